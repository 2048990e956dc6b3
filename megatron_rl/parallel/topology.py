"""Who is who: rank <-> (tp, cp, dp, pp) coordinates. Pure integers; the one source of truth about layouts.

The order is Megatron-Core's default "tp-cp-ep-dp-pp": tp varies fastest, pp slowest.

Example: Topology(world=8, tp=2, pp=2) has dp=2; rank 5 = tp 1, dp 0, pp 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coords:
    """Place of one rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes of `world` ranks. Raises ValueError where they do not multiply to it."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.cp * self.pp):
            raise ValueError(
                f"world size {self.world} is no multiple of tp {self.tp} x cp {self.cp} x pp {self.pp}; "
                "change the number of ranks or an axis"
            )

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

    def is_dp_head(self, rank: int) -> bool:
        """Whether `rank` answers for its data-parallel replica: first tp and cp rank of the last pipeline stage."""
        at = self.coords(rank)
        return at.tp == 0 and at.cp == 0 and at.pp == self.pp - 1
