"""Estimate the traffic of a weight sync without planning every tensor: 671B parameters on 1,024 ranks. Pure.

Tensors that are sharded identically over the same ranks on both sides are one bundle with a count (reshard/bundles.py).
solve.py chooses and proves the moves of a bundle, as for the exact plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.reshard.bundles import Trainers, kind_bundles, placed
from megatron_rl.reshard.rank_order import in_best_order
from megatron_rl.reshard.shards import EngineLayout
from megatron_rl.reshard.solve import Bundle, Loads, Placement, Rect, area, merge_rects, solve
from megatron_rl.reshard.tables import ModelTable


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
        engine, covered = in_best_order(bundles, engine, gpus_per_node, ascending)
    everyone = tuple(sorted({*range(world), *ranks}))
    nodes = {rank: rank // gpus_per_node for rank in everyone}
    loads = Loads(Placement(everyone, nodes, {rank: rank for rank in everyone}, colocated))
    moves = waves = 0
    for solved in solve(placed(bundles, engine), loads):
        moves += len(solved.moves) * solved.count
        waves = max(waves, *(step[3] + 1 for step in solved.moves))
    natural = None if covered is None else sum(loads.needed.values()) - covered
    return SyncCost(loads, engine, natural, _node_held(bundles, nodes), moves, waves, len(bundles))


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
