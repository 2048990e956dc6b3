"""Who is who: rank <-> (tp, cp, dp, pp) coordinates. Pure integers; the one source of truth about layouts.

The order is Megatron-Core's default "tp-cp-ep-dp-pp": tp varies fastest, pp slowest. Layers of experts see the ranks of
a pipeline stage in another way, as etp x ep x edp instead of tp x cp x dp.

Example: Topology(world=8, tp=2, pp=2) has dp=2; rank 5 = tp 1, dp 0, pp 1. With ep=4, etp=1 it has edp=1, and rank 5
holds part 1 of 4 of its stage's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.sections.actor import ParallelConfig


@dataclass(frozen=True)
class Coords:
    """Place of one rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ExpertCoords:
    """Place of one rank among those that hold experts: part of an expert, part of the experts, replica, stage."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes of `world` ranks. Raises ValueError where they do not multiply to it.

    etp: ranks that share each expert; tp when not given, Megatron's rule.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.cp * self.pp):
            raise ValueError(
                f"world size {self.world} is no multiple of tp {self.tp} x cp {self.cp} x pp {self.pp}; "
                "change the number of ranks or an axis"
            )
        if self.world % (self.expert_tp * self.ep * self.pp):
            raise ValueError(
                f"world size {self.world} is no multiple of etp {self.expert_tp} x ep {self.ep} x pp {self.pp}; "
                "change the number of ranks or an axis"
            )

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.tp * self.cp * self.pp)

    def coords(self, rank: int) -> Coords:
        """Coordinates of `rank`."""
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        return Coords(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coords: Coords) -> int:
        """Rank at `coords`: the inverse of `coords`."""
        return coords.tp + self.tp * (coords.cp + self.cp * (coords.dp + self.dp * coords.pp))

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Coordinates of `rank` in the layers of experts."""
        etp, rest = rank % self.expert_tp, rank // self.expert_tp
        ep, rest = rest % self.ep, rest // self.ep
        edp, pp = rest % self.edp, rest // self.edp
        return ExpertCoords(etp=etp, ep=ep, edp=edp, pp=pp)

    def is_dp_head(self, rank: int) -> bool:
        """Whether `rank` answers for its data-parallel replica: first tp and cp rank of the last pipeline stage."""
        at = self.coords(rank)
        return at.tp == 0 and at.cp == 0 and at.pp == self.pp - 1


def is_last_chunk(stage: int, chunk: int, *, pp: int, vpp: int) -> bool:
    """Whether a model chunk of a pipeline stage is the last one: the final norm and the heads are there."""
    return stage == pp - 1 and chunk == vpp - 1


def topology_of(parallel: ParallelConfig, world: int) -> Topology:
    """The topology that a config's layout has on `world` ranks."""
    return Topology(world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, ep=parallel.ep, etp=parallel.expert_tp)
