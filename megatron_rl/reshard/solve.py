"""Choose the moves of one bundle of tensors, and prove them. Pure integers over rectangles; used by the exact plan
(reshard/plan.py) and by the estimate for any size (reshard/planning/cost.py).

A rectangle is (first row, end row, first column, end column) of an HF tensor; 1-D tensors have one column.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megatron_rl.errors import ReshardError

Rect = tuple[int, int, int, int]
Owners = tuple[tuple[tuple[Rect, ...], tuple[int, ...]], ...]
Step = tuple[Rect, int, int, int]
"""(rectangle, source, target, wave)"""
VARIANTS = 8
"""A bundle that engines forward gets up to this many choices of sources, to spread the load."""


@dataclass(frozen=True)
class Placement:
    """The processes of a plan: node and GPU of each. colocated: trainers and engines share processes."""

    ranks: tuple[int, ...]
    nodes: Mapping[int, int]
    gpus: Mapping[int, int]
    colocated: bool


@dataclass(frozen=True)
class Bundle:
    """`count` tensors that are sharded identically over the same ranks on both sides.

    names: of the tensors (in an estimate one name stands for all). held, needed: rectangles -> the trainer ranks that
    have, and the engine ranks that need, exactly these. flat: the tensors are 1-D.
    """

    names: tuple[str, ...]
    count: int
    held: Mapping[tuple[Rect, ...], tuple[int, ...]]
    needed: Mapping[tuple[Rect, ...], tuple[int, ...]]
    flat: bool

    @property
    def key(self) -> tuple[bool, Owners, Owners]:
        """Equal for bundles that can be merged, in whatever order they were built."""
        return (self.flat, tuple(sorted(self.held.items())), tuple(sorted(self.needed.items())))


@dataclass(frozen=True)
class Solved:
    """One choice of moves for `count` tensors of a bundle."""

    bundle: Bundle
    names: tuple[str, ...]
    count: int
    moves: list[Step]


@dataclass
class Loads:
    """Elements by process, summed over the plan so far. The choice of sources reads them and the report shows them.

    far_sent, far_moved: the share of sent and moved that crosses nodes. total: elements of the whole model.
    """

    placement: Placement
    total: int = 0
    local: dict[int, int] = field(default_factory=dict[int, int])
    moved: dict[int, int] = field(default_factory=dict[int, int])
    sent: dict[int, int] = field(default_factory=dict[int, int])
    far_moved: dict[int, int] = field(default_factory=dict[int, int])
    far_sent: dict[int, int] = field(default_factory=dict[int, int])
    minimum: dict[int, int] = field(default_factory=dict[int, int])
    needed: dict[int, int] = field(default_factory=dict[int, int])
    held: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for counts in (self.local, self.moved, self.sent, self.far_moved, self.far_sent):
            counts.update(dict.fromkeys(self.placement.ranks, 0))
        for counts in (self.minimum, self.needed, self.held):
            counts.update(dict.fromkeys(self.placement.ranks, 0))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes, ascending."""
        return self.placement.ranks


def area(rect: Rect) -> int:
    """Elements of a rectangle."""
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


def common(one: Rect, other: Rect) -> int:
    """Elements that two rectangles share."""
    top, bottom = one[0] if one[0] > other[0] else other[0], one[1] if one[1] < other[1] else other[1]
    if top >= bottom:
        return 0
    left, right = one[2] if one[2] > other[2] else other[2], one[3] if one[3] < other[3] else other[3]
    return (bottom - top) * (right - left) if left < right else 0


def shared(some: Sequence[Rect], others: Sequence[Rect]) -> int:
    """Elements in both of two sets of rectangles, each without overlap."""
    if len(some) == 1 and len(others) == 1:
        return common(some[0], others[0])
    return sum(common(one, other) for one in some for other in others)


def inside(rect: Rect, rects: Sequence[Rect]) -> bool:
    """Whether rectangles without overlap cover a whole rectangle."""
    return rect in rects or shared((rect,), rects) == area(rect)


def covered(cell: Rect, rects: Sequence[Rect]) -> bool:
    """Whether one of the rectangles contains the cell; the cell must lie wholly inside or outside each."""
    top, left = cell[0], cell[2]
    return any(rect[0] <= top < rect[1] and rect[2] <= left < rect[3] for rect in rects)


def merge_rects(rects: Iterable[Rect]) -> tuple[Rect, ...]:
    """The same area in fewer rectangles: those that touch by rows, then by columns, are joined, duplicates dropped."""
    unique = sorted(set(rects))
    if len(unique) == 1:
        return tuple(unique)
    rows = _joined(unique, (2, 3, 0, 1))
    merged = _joined(rows, (0, 1, 2, 3))
    for first, one in enumerate(merged):
        for other in merged[first + 1 :]:
            if common(one, other):
                return _cut_apart(merged)
    return tuple(sorted(merged))


def _joined(rects: Sequence[Rect], axes: tuple[int, int, int, int]) -> list[Rect]:
    """Join rectangles that agree on the first two of axes and touch or overlap on the last two."""
    fixed0, fixed1, start, end = axes
    joined: list[list[int]] = []
    for rect in sorted(rects, key=lambda one: (one[fixed0], one[fixed1], one[start])):
        last = joined[-1] if joined else None
        if last and last[fixed0] == rect[fixed0] and last[fixed1] == rect[fixed1] and rect[start] <= last[end]:
            last[end] = max(last[end], rect[end])
        else:
            joined.append(list(rect))
    return [(rect[0], rect[1], rect[2], rect[3]) for rect in joined]


def _cut_apart(rects: Sequence[Rect]) -> tuple[Rect, ...]:
    """Overlapping rectangles as the cells of their common grid, joined again by rows."""
    cells = [cell for cell in _cells(rects) if covered(cell, rects)]
    return tuple(sorted(_joined(cells, (2, 3, 0, 1))))


def _cells(rects: Iterable[Rect]) -> Iterator[Rect]:
    """The grid that all edges of the rectangles cut."""
    rects = list(rects)
    rows = sorted({edge for rect in rects for edge in rect[:2]})
    cols = sorted({edge for rect in rects for edge in rect[2:]})
    for left, right in pairwise(cols):
        for top, bottom in pairwise(rows):
            yield (top, bottom, left, right)


def solve(bundles: Iterable[Bundle], loads: Loads) -> Iterator[Solved]:
    """Yield the proved moves of each bundle, largest bundles first, and add them to loads. Every process computes the
    same moves, in whatever order the bundles and their owners are given.

    Raises ReshardError naming the tensor, rows and columns if the two sides do not match.
    """
    ordered = (replace(one, held=dict(one.key[1]), needed=dict(one.key[2])) for one in bundles)
    sized = [(sum(area(rect) for rect in _extent(bundle)) * bundle.count, bundle) for bundle in ordered]
    for size, bundle in sorted(sized, key=lambda one: (-one[0], one[1].key)):
        loads.total += size
        variants = 1 if loads.placement.colocated else min(bundle.count, VARIANTS)
        for variant in range(variants):
            names = bundle.names[variant::variants]
            count = len(range(variant, bundle.count, variants))
            moves = _join_moves(_choose(bundle, count, loads))
            prove(bundle, moves)
            yield Solved(bundle, names, count, moves)
        _count(bundle, loads)


def _extent(bundle: Bundle) -> tuple[Rect, ...]:
    """All that the trainers hold, as rectangles without overlap. Raises ReshardError if engines need more or less."""
    held = merge_rects(rect for rects in bundle.held for rect in rects)
    needed = merge_rects(rect for rects in bundle.needed for rect in rects)
    if held != needed:
        for cell in _cells((*held, *needed)):
            in_held = covered(cell, held)
            if in_held != covered(cell, needed):
                trained = "on trainer ranks, but on no engine rank"
                what = trained if in_held else "needed by engine ranks, but on no trainer rank"
                raise ReshardError(
                    f"{bundle.names[0]} {_shown(cell, bundle)} is {what}; the two sides' shapes disagree"
                )
    return held


def _shown(rect: Rect, bundle: Bundle) -> str:
    rows = f"rows {rect[0]}:{rect[1]}"
    return rows if bundle.flat else f"{rows} cols {rect[2]}:{rect[3]}"


def _choose(bundle: Bundle, count: int, loads: Loads) -> Iterator[Step]:
    """A source for every cell of every engine process that needs it."""
    for cell in _cells({rect for side in (bundle.held, bundle.needed) for rects in side for rect in rects}):
        needers = [rank for rects, ranks in bundle.needed.items() if covered(cell, rects) for rank in ranks]
        if not needers:
            continue
        holders = [rank for rects, ranks in bundle.held.items() if covered(cell, rects) for rank in ranks]
        weight = area(cell) * count
        held_by = set(holders)
        missing: dict[int, list[int]] = {}
        nodes = loads.placement.nodes
        for rank in needers:
            if rank in held_by:
                loads.local[rank] += weight
                yield cell, rank, rank, 0
            else:
                missing.setdefault(nodes[rank], []).append(rank)
        if missing:
            choose = _direct if loads.placement.colocated else _fanned_out
            for source, target, wave in choose(missing, holders, weight, loads):
                yield cell, source, target, wave


def _send(source: int, target: int, weight: int, loads: Loads) -> None:
    loads.sent[source] += weight
    loads.moved[target] += weight
    nodes = loads.placement.nodes
    if nodes[source] != nodes[target]:
        loads.far_sent[source] += weight
        loads.far_moved[target] += weight


def _near(holders: Iterable[int], target: int, loads: Loads) -> int:
    """The holder on the target's GPU, or else the one that has sent least."""
    gpus, sent = loads.placement.gpus, loads.sent
    return min(holders, key=lambda rank: (gpus[rank] != gpus[target], sent[rank], rank))


def _direct(
    missing: Mapping[int, Sequence[int]], holders: Sequence[int], weight: int, loads: Loads
) -> Iterator[tuple[int, int, int]]:
    """Colocated: within a node, any holder there sends. Another node gets the cell once and forwards it inside.

    All processes are trainers and engines, so direct sends spread the load; forwarding saves traffic between nodes.
    """
    nodes = loads.placement.nodes
    by_node: dict[int, list[int]] = {}
    for rank in holders:
        by_node.setdefault(nodes[rank], []).append(rank)
    far: list[tuple[int, int]] = []
    for node, targets in missing.items():
        inside = by_node.get(node)
        if inside is None:
            far = far or [(loads.far_sent[rank], rank) for rank in holders]
            continue
        for target in targets:
            source = inside[0] if len(inside) == 1 else _near(inside, target, loads)
            _send(source, target, weight, loads)
            yield source, target, 0
    heapq.heapify(far)
    for node, targets in missing.items():
        if node in by_node:
            continue
        load, source = far[0]
        heapq.heapreplace(far, (load + weight, source))
        yield from _enter(source, targets, 0, weight, loads)


def _enter(source: int, targets: Sequence[int], wave: int, weight: int, loads: Loads) -> Iterator[tuple[int, int, int]]:
    """Send into a node once, to the target that has forwarded least; it forwards to the others in the next wave."""
    entry = targets[0] if len(targets) == 1 else min(targets, key=lambda rank: (loads.sent[rank], rank))
    _send(source, entry, weight, loads)
    yield source, entry, wave
    for target in targets:
        if target != entry:
            _send(entry, target, weight, loads)
            yield entry, target, wave + 1


def _fanned_out(
    missing: Mapping[int, Sequence[int]], holders: Sequence[int], weight: int, loads: Loads
) -> Iterator[tuple[int, int, int]]:
    """Disaggregated: each trainer process sends a byte at most once; the engines that need it forward it.

    In wave 0 the trainers send to as many nodes as there are holders, their own nodes first; these nodes send to the
    others in wave 1. Tensors enter at different engines, so this is a scatter followed by an all-gather: each engine
    process sends and receives about what it needs, for any number of replicas.
    """
    nodes = loads.placement.nodes
    free = set(holders)
    entries: dict[int, int] = {}
    if len(free) >= sum(map(len, missing.values())):
        # A trainer for every engine process: nothing to forward.
        for node, targets in missing.items():
            for target in targets:
                source = _near([rank for rank in free if nodes[rank] == node] or free, target, loads)
                free.remove(source)
                _send(source, target, weight, loads)
                yield source, target, 0
        return
    with_trainers = {nodes[rank] for rank in holders}
    # Nodes whose engines have forwarded least get it first, and forward it.
    spent = {node: min(loads.sent[rank] for rank in targets) for node, targets in missing.items()}
    for node in sorted(missing, key=lambda node: (node not in with_trainers, spent[node], node)):
        targets = missing[node]
        if free:
            wave, near = 0, [rank for rank in free if nodes[rank] == node]
            source = _near(near or free, targets[0], loads)
            free.remove(source)
        else:
            wave, source = 1, min(entries.values(), key=lambda rank: (loads.far_sent[rank], rank))
        hops = list(_enter(source, targets, wave, weight, loads))
        if wave == 0:
            entries[node] = hops[0][1]
        yield from hops


def _join_moves(steps: Iterable[Step]) -> list[Step]:
    """Join moves of one source, target and wave whose rectangles touch."""
    groups: dict[tuple[int, int, int], list[Rect]] = {}
    for rect, source, target, wave in steps:
        groups.setdefault((source, target, wave), []).append(rect)
    return [
        (rect, source, target, wave)
        for (source, target, wave), rects in groups.items()
        for rect in (rects if len(rects) == 1 else merge_rects(rects))
    ]


def prove(bundle: Bundle, moves: Sequence[Step]) -> None:
    """Check the moves against the bundle alone, independently of how they were chosen.

    Each needed byte is written exactly once on each engine process, and nothing else is written. Each source has what
    it sends: from its trainer shard in wave 0, from earlier waves later. No process receives what it has already,
    so the bytes received are the minimum. Raises ReshardError naming tensor, process, rows and columns.
    """
    name = bundle.names[0]
    held = {rank: rects for rects, ranks in bundle.held.items() for rank in ranks}
    into: dict[int, list[Step]] = {}
    for step in moves:
        into.setdefault(step[2], []).append(step)
    needers: set[int] = set()
    for rects, ranks in bundle.needed.items():
        size = sum(map(area, rects))
        needers.update(ranks)
        for rank in ranks:
            got = into.get(rank, [])
            _prove_target(bundle, rank, rects, got, size)
            mine = held.get(rank)
            received = sum(area(step[0]) for step in got if step[1] != rank)
            least = size - shared(rects, mine) if mine else size
            if received != least:
                raise ReshardError(f"{name}: process {rank} receives {received} elements, the minimum is {least}")
    strangers = sorted(into.keys() - needers)
    if strangers:
        raise ReshardError(f"{name}: processes {strangers} receive it but do not need it")
    for rect, source, target, wave in moves:
        earlier = held.get(source, ()) if wave == 0 else [step[0] for step in into.get(source, ()) if step[3] < wave]
        if not inside(rect, earlier):
            raise ReshardError(
                f"{name} {_shown(rect, bundle)}: process {source} sends it to {target} in wave {wave} before it has it"
            )


def _prove_target(bundle: Bundle, rank: int, rects: Sequence[Rect], got: Sequence[Step], size: int) -> None:
    name, written = bundle.names[0], 0
    for place, step in enumerate(got):
        rect = step[0]
        written += area(rect)
        if not inside(rect, rects):
            raise ReshardError(f"{name} {_shown(rect, bundle)}: process {rank} receives it but does not need it")
        for other in got[place + 1 :]:
            if common(rect, other[0]):
                raise ReshardError(
                    f"{name} {_shown(rect, bundle)} and {_shown(other[0], bundle)} of process {rank}: written twice"
                )
    if written != size:
        missing = next(
            cell
            for cell in _cells((*rects, *(step[0] for step in got)))
            if covered(cell, rects) and not covered(cell, [step[0] for step in got])
        )
        raise ReshardError(f"{name} {_shown(missing, bundle)}: process {rank} needs it but no move writes it")


def _count(bundle: Bundle, loads: Loads) -> None:
    """Add to loads what each process holds, needs and must receive of the bundle."""
    held = {rank: rects for rects, ranks in bundle.held.items() for rank in ranks}
    for rects, ranks in bundle.held.items():
        size = sum(area(rect) for rect in rects) * bundle.count
        for rank in ranks:
            loads.held[rank] += size
    for rects, ranks in bundle.needed.items():
        size = sum(area(rect) for rect in rects) * bundle.count
        for rank in ranks:
            mine = held.get(rank)
            loads.needed[rank] += size
            loads.minimum[rank] += size - (shared(rects, mine) * bundle.count if mine else 0)
