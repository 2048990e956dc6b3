"""Tensors that are sharded identically over the same ranks on both sides, as bundles made from parallel sizes. Pure.

One layer stands for all equal layers of a pipeline stage, one expert for all experts that share trainer and engine
ranks: so models and clusters of any size have a few hundred bundles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.models.engine import experts_of
from megatron_rl.models.stacks import member_of
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.shards import EngineLayout
from megatron_rl.reshard.solve import Bundle, Rect
from megatron_rl.reshard.tables import Held, ModelTable

HolderTable = dict[tuple[Rect, ...], tuple[int, ...]]
"""rectangles of one tensor -> the ranks that have exactly these"""


@dataclass(frozen=True)
class Trainers:
    """The trainer's parallel sizes, and the [pp][vpp] layers of its stages."""

    topology: Topology
    stages: Sequence[Sequence[range]]

    @cached_property
    def dense_ranks(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(stage, tp rank) -> the ranks there."""
        ranks_at: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.topology.world):
            at = self.topology.coords(rank)
            ranks_at.setdefault((at.pp, at.tp), []).append(rank)
        return {key: tuple(ranks) for key, ranks in ranks_at.items()}

    @cached_property
    def expert_ranks(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """(stage, ep rank, etp rank) -> the ranks there."""
        ranks_at: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.topology.world):
            at = self.topology.expert_coords(rank)
            ranks_at.setdefault((at.pp, at.ep, at.etp), []).append(rank)
        return {key: tuple(ranks) for key, ranks in ranks_at.items()}


def kind_bundles(table: ModelTable, trainers: Trainers, *, tp: int, ep: int) -> list[Bundle]:
    """Bundles of the whole model whose `needed` is by kind of engine slot (EngineLayout.num_kinds)."""
    bundles: dict[object, Bundle] = {}
    for bundle in (*_ends(table, trainers, tp, ep), *_layers(table, trainers, tp, ep)):
        key = bundle.key
        same = bundles.get(key)
        bundles[key] = bundle if same is None else replace(same, count=same.count + bundle.count)
    return list(bundles.values())


def placed(bundles: Iterable[Bundle], engine: EngineLayout) -> Iterator[Bundle]:
    """The same bundles, their `needed` by rank instead of by kind of engine slot."""
    of_kind: list[list[int]] = [[] for _ in range(engine.num_kinds)]
    for slot, rank in enumerate(engine.ranks):
        of_kind[slot % engine.num_kinds].append(rank)
    for bundle in bundles:
        needed = {
            rects: tuple(sorted(rank for kind in kinds for rank in of_kind[kind]))
            for rects, kinds in bundle.needed.items()
        }
        yield replace(bundle, needed=needed)


def _ends(table: ModelTable, trainers: Trainers, tp: int, ep: int) -> Iterator[Bundle]:
    size, last = trainers.topology.tp, len(trainers.stages) - 1
    parts = [
        (table.trainer_ends(size, rank, first=stage == 0, last=stage == last), trainers.dense_ranks[stage, rank])
        for stage in sorted({0, last})
        for rank in range(size)
    ]
    needed = _owners((table.engine_ends(tp, kind % tp), (kind,)) for kind in range(max(tp, ep)))
    for name, owners in _owners(parts).items():
        yield Bundle((name,), 1, owners, needed[name], flat=name.endswith("norm.weight"))


def _layers(table: ModelTable, trainers: Trainers, tp: int, ep: int) -> Iterator[Bundle]:
    topology = trainers.topology
    stage_of = {layer: stage for stage, chunks in enumerate(trainers.stages) for chunk in chunks for layer in chunk}
    for variant in table.variants():
        shown = variant[0]
        needed = _owners((table.engine(shown, tp, kind % tp, ep, kind % ep), (kind,)) for kind in range(max(tp, ep)))
        dense = [table.trainer(shown, topology.tp, rank) for rank in range(topology.tp)]
        groups = [
            (ep_rank, count, [table.trainer_expert(shown, expert, topology.expert_tp, part) for part in parts])
            for ep_rank, expert, count in _expert_groups(table.num_experts(shown), topology.ep, ep)
            for parts in [range(topology.expert_tp)]
        ]
        for stage in range(len(trainers.stages)):
            layers = [layer for layer in variant if stage_of[layer] == stage]
            if not layers:
                continue
            parts = [(held, trainers.dense_ranks[stage, rank]) for rank, held in enumerate(dense)]
            tensors = [(name, owners, 1) for name, owners in _owners(parts).items()]
            for ep_rank, count, experts in groups:
                parts = [(held, trainers.expert_ranks[stage, ep_rank, part]) for part, held in enumerate(experts)]
                tensors += [(name, owners, count) for name, owners in _owners(parts).items()]
            for name, owners, count in tensors:
                # Biases of experts that files stack are rows of a matrix in the tables.
                flat = name.endswith(("norm.weight", ".bias", "_bias", "sinks")) and member_of(name) is None
                title = name.replace(f"layers.{shown}.", f"layers.{layers[0]}.", 1)
                yield Bundle((title,), count * len(layers), owners, needed[name], flat)


def _expert_groups(num_experts: int, trainer_ep: int, engine_ep: int) -> Iterator[tuple[int, int, int]]:
    """(trainer ep rank, first expert, number of experts) of each set of experts with equal ep ranks on both sides."""
    if not num_experts:
        return
    share = num_experts // trainer_ep
    for ep_rank in range(trainer_ep):
        for engine_rank in range(engine_ep):
            others = experts_of(num_experts, engine_ep, engine_rank)
            first, last = max(ep_rank * share, others.start), min((ep_rank + 1) * share, others.stop)
            if first < last:
                yield ep_rank, first, last - first


def _owners(parts: Iterable[tuple[Held, Sequence[int]]]) -> dict[str, HolderTable]:
    """HF name -> rectangles -> the ranks that have exactly these."""
    ranks_of: dict[str, dict[tuple[Rect, ...], list[int]]] = {}
    for held, owners in parts:
        for name, rects in held.items():
            ranks_of.setdefault(name, {}).setdefault(rects, []).extend(owners)
    return {
        name: {rects: tuple(sorted(owners)) for rects, owners in by_rects.items()}
        for name, by_rects in ranks_of.items()
    }
