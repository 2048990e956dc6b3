"""Estimate the traffic of a weight sync without planning every tensor: 671B parameters on 1,024 ranks. Pure.

Tensors that are sharded identically over the same ranks on both sides are one bundle with a count. solve.py chooses
and proves the moves of a bundle, as for the exact plan. The bundles are made from the parallel sizes: one layer stands
for all equal layers of a pipeline stage, one expert for all experts that share trainer and engine ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.models.engine import experts_of
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.planning.tables import Held, ModelTable
from megatron_rl.reshard.rank_order import best_order, overlaps_of
from megatron_rl.reshard.shards import EngineLayout
from megatron_rl.reshard.solve import Bundle, Loads, Placement, Rect, area, merge_rects, solve

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


@dataclass(frozen=True)
class SyncCost:
    """What one weight sync costs.

    engine: the engines' layout, in the chosen order of ranks. natural_moved: elements that all ranks would receive if
    engine slot s were rank s; None if not colocated. node_held: node -> elements that its trainer ranks have together.
    """

    loads: Loads
    engine: EngineLayout
    natural_moved: int | None
    node_held: Mapping[int, int]
    num_moves: int
    num_waves: int
    num_bundles: int


def sync_cost(
    table: ModelTable,
    trainers: Trainers,
    *,
    tp: int,
    ep: int,
    replicas: int,
    colocated: bool,
    gpus_per_node: int,
    ascending: bool = False,
) -> SyncCost:
    """Choose the rank order and every move, prove the moves, and add up their costs.

    tp, ep, replicas: of the engines (shards.EngineLayout). Colocated engines use the trainer's ranks, others use ranks
    numbered after these. gpus_per_node: ranks of a node, one a GPU. ascending: see rank_order.best_order.
    Raises ReshardError as make_plan does.
    """
    world, count = trainers.topology.world, replicas * tp
    ranks = tuple(range(count)) if colocated else tuple(range(world, world + count))
    bundles = kind_bundles(table, trainers, tp=tp, ep=ep)
    engine = EngineLayout(tp, ep, ranks)
    covered = None
    if colocated:
        engine, covered = _searched(bundles, engine, gpus_per_node, ascending)
    everyone = tuple(sorted({*range(world), *ranks}))
    nodes = {rank: rank // gpus_per_node for rank in everyone}
    loads = Loads(Placement(everyone, nodes, {rank: rank for rank in everyone}, colocated))
    moves = waves = 0
    for solved in solve(placed(bundles, engine), loads):
        moves += len(solved.moves) * solved.count
        waves = max(waves, *(step[3] + 1 for step in solved.moves))
    natural = None if covered is None else sum(loads.needed.values()) - covered
    return SyncCost(loads, engine, natural, _node_held(bundles, nodes), moves, waves, len(bundles))


def colocated_layout(
    table: ModelTable, trainers: Trainers, *, tp: int, ep: int = 1, gpus_per_node: int, ascending: bool = False
) -> EngineLayout:
    """Engines on all of the trainer's ranks, in the order in which most elements stay on their rank.

    Computed from the parallel sizes alone, so every rank gets the same order. ascending: see rank_order.best_order.
    Raises ReshardError if the ranks do not divide into engines.
    """
    engine = EngineLayout(tp, ep, tuple(range(trainers.topology.world)))
    return _searched(kind_bundles(table, trainers, tp=tp, ep=ep), engine, gpus_per_node, ascending)[0]


def _searched(
    bundles: Sequence[Bundle], engine: EngineLayout, gpus_per_node: int, ascending: bool
) -> tuple[EngineLayout, int]:
    """The engines in the best order; and the elements that would stay on their rank in the natural order."""
    ranks, kinds = engine.ranks, engine.num_kinds
    overlaps = overlaps_of(bundles, ranks, kinds)
    per_node = min(gpus_per_node, len(ranks))
    order = best_order(overlaps, ranks, num_kinds=kinds, gpus_per_node=per_node, ascending=ascending)
    return replace(engine, ranks=order), sum(overlaps[rank][slot % kinds] for slot, rank in enumerate(ranks))


def _node_held(bundles: Iterable[Bundle], nodes: Mapping[int, int]) -> dict[int, int]:
    elements = dict.fromkeys(nodes.values(), 0)
    for bundle in bundles:
        by_node: dict[int, set[Rect]] = {}
        for rects, ranks in bundle.held.items():
            for node in {nodes[rank] for rank in ranks}:
                by_node.setdefault(node, set()).update(rects)
        sizes: dict[frozenset[Rect], int] = {}
        for node, rects in by_node.items():
            key = frozenset(rects)
            if key not in sizes:
                sizes[key] = sum(map(area, merge_rects(key)))
            elements[node] += sizes[key] * bundle.count
    return elements


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


def kind_bundles(table: ModelTable, trainers: Trainers, *, tp: int, ep: int) -> list[Bundle]:
    """Bundles of the whole model whose `needed` is by kind of engine slot (EngineLayout.num_kinds)."""
    bundles: dict[object, Bundle] = {}
    for bundle in (*_ends(table, trainers, tp, ep), *_layers(table, trainers, tp, ep)):
        key = bundle.key
        same = bundles.get(key)
        bundles[key] = bundle if same is None else replace(same, count=same.count + bundle.count)
    return list(bundles.values())


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
                flat = name.endswith(("norm.weight", ".bias", "_bias"))
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
