"""Which engine slot each process takes, so that its trainer shard covers as much of it as can be. Pure.

Colocated, a process receives what its engine slot needs and its trainer shard lacks, so the sum of overlaps is to be
largest: an assignment problem (Kuhn 1955), solved exactly within blocks of neighbouring processes. A block is a node,
or as many processes as one engine spans when that is more: engines never span more nodes than they must.

Example: TP 8 trains and TP 2 generates on one node. Processes 0-3 hold the first half of each matrix, 4-7 the second,
so 0-3 become rank 0 and 4-7 rank 1 of four engines: (0, 4), (1, 5), (2, 6), (3, 7). This is the strided grouping of
HybridFlow (Sheng et al. 2024, section 5.3); with neighbours (0, 1), (2, 3), ... a sixth more must be received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from megatron_rl.reshard.bundles import Trainers, kind_bundles
from megatron_rl.reshard.shards import EngineLayout
from megatron_rl.reshard.solve import Bundle, shared
from megatron_rl.reshard.tables import ModelTable

Overlaps = Mapping[int, Sequence[int]]
"""process -> for each kind of slot, the elements that its trainer shard covers"""


def colocated_layout(
    table: ModelTable, trainers: Trainers, *, tp: int, ep: int = 1, gpus_per_node: int, ascending: bool = False
) -> EngineLayout:
    """Engines on all of the trainer's ranks, in the order in which most elements stay on their rank.

    Computed from the parallel sizes alone, so every rank gets the same order. ascending: see best_order.
    Raises ReshardError if the ranks do not divide into engines.
    """
    engine = EngineLayout(tp, ep, tuple(range(trainers.topology.world)))
    return in_best_order(kind_bundles(table, trainers, tp=tp, ep=ep), engine, gpus_per_node, ascending)[0]


def in_best_order(
    bundles: Sequence[Bundle], engine: EngineLayout, gpus_per_node: int, ascending: bool
) -> tuple[EngineLayout, int]:
    """The engines in the best order; and the elements that would stay on their rank in the natural order."""
    ranks, kinds = engine.ranks, engine.num_kinds
    overlaps = overlaps_of(bundles, ranks, kinds)
    per_node = min(gpus_per_node, len(ranks))
    order = best_order(overlaps, ranks, num_kinds=kinds, gpus_per_node=per_node, ascending=ascending)
    return replace(engine, ranks=order), sum(overlaps[rank][slot % kinds] for slot, rank in enumerate(ranks))


def overlaps_of(bundles: Sequence[Bundle], ranks: Sequence[int], num_kinds: int) -> dict[int, tuple[int, ...]]:
    """Covered elements of each kind of slot on each process; bundles' `needed` is by kind here, not by process."""
    marks: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    tables: dict[tuple[int, int], list[int]] = {}
    for number, bundle in enumerate(bundles):
        for place, (rects, holders) in enumerate(bundle.held.items()):
            row = tables[number, place] = [0] * num_kinds
            for needs, kinds in bundle.needed.items():
                size = shared(rects, needs) * bundle.count
                for kind in kinds:
                    row[kind] += size
            for rank in holders:
                marks[rank].append((number, place))
    known: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
    found: dict[int, tuple[int, ...]] = {}
    for rank, mark in marks.items():
        key = tuple(mark)
        if key not in known:
            known[key] = tuple(map(sum, zip(*(tables[one] for one in key), strict=True))) if key else (0,) * num_kinds
        found[rank] = known[key]
    return found


def best_order(
    overlaps: Overlaps, ranks: Sequence[int], *, num_kinds: int, gpus_per_node: int, ascending: bool = False
) -> tuple[int, ...]:
    """The process of each engine slot: slot s is of kind s % num_kinds, and each num_kinds slots make a group.

    ranks: the processes, node by node; their number must be a multiple of num_kinds. The order is the natural one
    (slot s on ranks[s]) wherever no other covers more. ascending: only orders where the processes of each group ascend,
    for collectives that know no other; the best of the strided ones then.
    """
    assert len(ranks) % num_kinds == 0, (len(ranks), num_kinds)
    size = num_kinds if num_kinds >= gpus_per_node else lcm(num_kinds, gpus_per_node)
    order: list[int] = []
    known: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for start in range(0, len(ranks), size):
        block = ranks[start : start + size]
        key = tuple(tuple(overlaps[rank]) for rank in block)
        if key not in known:
            known[key] = _strided(key, num_kinds) if ascending else _assign(key, num_kinds)
        order += [block[place] for place in known[key]]
    return tuple(order)


def _strided(rows: Sequence[Sequence[int]], num_kinds: int) -> list[int]:
    """The grouping (base, base + stride, base + 2 * stride, ...) of a block that covers most; stride 1 among equals."""
    groups = len(rows) // num_kinds
    best: list[int] = []
    most = -1
    for stride in (one for one in range(1, groups + 1) if groups % one == 0):
        starts = [run * stride * num_kinds + first for run in range(groups // stride) for first in range(stride)]
        order = [start + kind * stride for start in starts for kind in range(num_kinds)]
        gain = sum(rows[place][slot % num_kinds] for slot, place in enumerate(order))
        if gain > most:
            best, most = order, gain
    return best


def _assign(rows: Sequence[Sequence[int]], num_kinds: int) -> list[int]:
    """Place of the process that each slot of a block takes; rows[place][kind] is the overlap."""
    count = len(rows)
    # Overlaps count first; among equals, processes that keep their natural kind.
    gains = [
        [row[slot % num_kinds] * (count + 1) + (place % num_kinds == slot % num_kinds) for slot in range(count)]
        for place, row in enumerate(rows)
    ]
    by_kind: list[list[int]] = [[] for _ in range(num_kinds)]
    for place, slot in enumerate(_matching(gains)):
        by_kind[slot % num_kinds].append(place)
    return [by_kind[slot % num_kinds][slot // num_kinds] for slot in range(count)]


def _matching(gains: Sequence[Sequence[int]]) -> list[int]:
    """column of each row so that the sum of gains is largest: shortest augmenting paths with potentials, O(n^3)."""
    count = len(gains)
    row_price, col_price = [0] * (count + 1), [0] * (count + 1)
    row_of = [0] * (count + 1)  # row that holds a column, from 1; column 0 holds the row to be placed
    for row in range(1, count + 1):
        row_of[0] = row
        col = 0
        slack: list[float] = [float("inf")] * (count + 1)
        came_from, used = [0] * (count + 1), [False] * (count + 1)
        while row_of[col]:
            used[col] = True
            at, step, nearest = row_of[col], float("inf"), 0
            costs, price = gains[at - 1], row_price[at]
            for other in range(1, count + 1):
                if used[other]:
                    continue
                cost = -costs[other - 1] - price - col_price[other]
                if cost < slack[other]:
                    slack[other], came_from[other] = cost, col
                if slack[other] < step:
                    step, nearest = slack[other], other
            step = int(step)
            for other in range(count + 1):
                if used[other]:
                    row_price[row_of[other]] += step
                    col_price[other] -= step
                else:
                    slack[other] -= step
            col = nearest
        while col:
            row_of[col] = row_of[came_from[col]]
            col = came_from[col]
    columns = [0] * count
    for col in range(1, count + 1):
        columns[row_of[col] - 1] = col - 1
    return columns
