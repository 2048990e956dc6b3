"""What every process of a layout holds or needs: from axis sizes to Shards. Pure.

Trainer processes are numbered as Megatron numbers ranks (parallel/topology.py). An engine's slot s is rank s % tp of
replica s // tp; EngineLayout.ranks says which process takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.errors import ReshardError
from megatron_rl.models.engine import engine_params, whole_params
from megatron_rl.models.rules import Family, LocalParam, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.topology import Topology, is_last_chunk
from megatron_rl.reshard.plan import Shard


@dataclass(frozen=True)
class EngineLayout:
    """How engines are laid out: `replicas` engines of tp ranks each.

    ep: ranks that the experts are dealt to: 1, or a multiple of tp (vLLM deals them over tp and its own data-parallel
    ranks, so ep / tp replicas are one engine to vLLM). ranks: the process of each slot, replica by replica.
    """

    tp: int
    ep: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ep != 1 and self.ep % self.tp:
            raise ReshardError(
                f"engine ep {self.ep} must be 1 or a multiple of tp {self.tp}: experts go to whole engines"
            )
        if not self.ranks or len(self.ranks) % self.num_kinds or len(set(self.ranks)) != len(self.ranks):
            raise ReshardError(
                f"{len(self.ranks)} engine processes are no multiple of {self.num_kinds} (tp {self.tp}, ep {self.ep}), "
                "or one is listed twice"
            )

    @property
    def num_kinds(self) -> int:
        """Slots that differ in what they need; slot s is of kind s % num_kinds."""
        return max(self.tp, self.ep)

    @property
    def replicas(self) -> int:
        """Engines of tp ranks."""
        return len(self.ranks) // self.tp


def trainer_params(
    shape: ModelShape, family: Family, topology: Topology, stages: Sequence[Sequence[range]], rank: int
) -> tuple[LocalParam, ...]:
    """What trainer `rank` holds that updates change; stages: [pp][vpp] layers, as models/stages.py gives them."""
    at, of_experts = topology.coords(rank), topology.expert_coords(rank)
    local: list[LocalParam] = []
    for chunk, layers in enumerate(stages[at.pp]):
        params = megatron_params(
            shape, family, tp=topology.tp, tp_rank=at.tp, layers=layers,
            pre_process=at.pp == 0 and chunk == 0,
            post_process=is_last_chunk(at.pp, chunk, pp=len(stages), vpp=len(stages[at.pp])),
            ep=topology.ep, ep_rank=of_experts.ep, etp=topology.expert_tp, etp_rank=of_experts.etp,
        )  # fmt: skip
        local += [replace(param, name=f"chunk{chunk}.{param.name}") for param in params if not param.constant]
    return tuple(local)


def trainer_shards(
    shape: ModelShape, family: Family, topology: Topology, stages: Sequence[Sequence[range]]
) -> list[Shard]:
    """What each of the topology's processes holds, by rank."""
    known: dict[object, tuple[LocalParam, ...]] = {}
    shards: list[Shard] = []
    for rank in range(topology.world):
        at, of_experts = topology.coords(rank), topology.expert_coords(rank)
        key = (at.tp, at.pp, of_experts.ep, of_experts.etp)
        if key not in known:
            known[key] = trainer_params(shape, family, topology, stages, rank)
        shards.append(Shard(rank, known[key]))
    return shards


def kind_shards(shape: ModelShape, family: Family, *, tp: int, ep: int = 1) -> list[Shard]:
    """What an engine slot of each kind needs; a shard's rank is the kind here."""
    return [
        Shard(kind, tuple(engine_params(shape, family, tp=tp, tp_rank=kind % tp, ep=ep, ep_rank=kind % ep)))
        for kind in range(max(tp, ep))
    ]


def engine_shards(shape: ModelShape, family: Family, layout: EngineLayout) -> list[Shard]:
    """What each process of vLLM engines needs, by slot."""
    kinds = kind_shards(shape, family, tp=layout.tp, ep=layout.ep)
    return [Shard(rank, kinds[slot % len(kinds)].params) for slot, rank in enumerate(layout.ranks)]


def whole_shards(shape: ModelShape, family: Family, ranks: Sequence[int]) -> list[Shard]:
    """What engines need that hold the HF tensors as they are, one on each process."""
    params = tuple(whole_params(shape, family))
    return [Shard(rank, params) for rank in ranks]
