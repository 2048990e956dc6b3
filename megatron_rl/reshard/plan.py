"""The plan of one weight sync: which rectangle of which HF tensor goes from which process to which. Pure, no tensors.

Both sides are described in Hugging Face coordinates (models/rules.py, models/engine.py), so a plan does not depend on
how either side fuses or splits its parameters. docs/resharding.md has a worked example.

    trainers = [Shard(0, (...)), Shard(1, (...))]      # what each process holds
    engines = [Shard(0, (...)), Shard(1, (...))]       # what its engine needs; same number, same process
    plan = make_plan(trainers, engines)
    mine = plan.of_rank(0)                             # local copies, sends, receives of process 0, in order
    for move in mine.local:
        sources, targets = places(trainers[0].params, move), places(engines[0].params, move)

A plan that make_plan returns is proved (reshard/solve.py): each byte of each engine parameter is written exactly once,
from a process that has it at that time, and no process receives a byte that it has already.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_rl.errors import ReshardError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam
from megatron_rl.reshard.solve import Bundle, Loads, Placement, Rect, Solved, merge_rects, solve

NodeOf = Callable[[int], int]


@dataclass(frozen=True)
class Shard:
    """The parameters of one process on one side; those of trainer chunk c are named f"chunk{c}.{megatron name}"."""

    rank: int
    params: tuple[LocalParam, ...]


class Move(NamedTuple):
    """A rectangle of one HF tensor that goes from one process to another; source == target is a local copy.

    rows, cols: half-open, in HF coordinates; cols is None for a 1-D tensor.
    source, target: process numbers common to both sides (colocated: trainer rank r and engine rank r are one
    process; disaggregated: engine processes are numbered after the trainer's).
    wave: in wave 0 the source reads its trainer parameter. In a later wave the source is an engine process that
    received the whole rectangle in earlier waves (maybe in several moves) and reads it from its engine parameter.
    """

    hf_name: str
    rows: tuple[int, int]
    cols: tuple[int, int] | None
    source: int
    target: int
    wave: int

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        rows = self.rows[1] - self.rows[0]
        return rows if self.cols is None else rows * (self.cols[1] - self.cols[0])


@dataclass(frozen=True)
class Place:
    """Where a rectangle, or a piece of it, lies inside one local parameter viewed as 2-D: [rows, columns].

    rows, cols: in the local parameter; a 3-D stack [E, r, c] is viewed as [E * r, c]; cols is None for 1-D ones.
    at_rows, at_cols: the same piece inside the rectangle, counted from its upper left corner.
    """

    param: str
    rows: slice
    cols: slice | None
    at_rows: slice
    at_cols: slice | None


class BlockIndex:
    """The blocks of one process's parameters by HF name: places() for many moves."""

    def __init__(self, params: Iterable[LocalParam]) -> None:
        self._of: dict[str, list[tuple[str, int, Block]]] = {}
        for param in params:
            top = 0
            for block in param.blocks:
                self._of.setdefault(block.hf_name, []).append((param.name, top, block))
                top += block.num_rows

    def places(self, move: Move) -> list[Place]:
        """See the function places."""
        pieces: list[Place] = []
        for name, top, block in self._of.get(move.hf_name, ()):
            first, last = max(block.rows[0], move.rows[0]), min(block.rows[1], move.rows[1])
            if first >= last:
                continue
            rows = slice(top + first - block.rows[0], top + last - block.rows[0])
            at_rows = slice(first - move.rows[0], last - move.rows[0])
            if move.cols is None or block.cols is None:
                pieces.append(Place(name, rows, None, at_rows, None))
                continue
            left, right = max(block.cols[0], move.cols[0]), min(block.cols[1], move.cols[1])
            if left < right:
                cols = slice(left - block.cols[0], right - block.cols[0])
                pieces.append(Place(name, rows, cols, at_rows, slice(left - move.cols[0], right - move.cols[0])))
        return pieces


def places(params: Iterable[LocalParam], move: Move) -> list[Place]:
    """Where the move's rectangle lies in these parameters, in their order.

    A rectangle may lie in several pieces (Megatron's QKV keeps KV groups together), and more than once (a tied or
    replicated tensor): a target writes all places; a source may read all, the later ones hold the same values.
    For many moves, use BlockIndex(params).places(move).
    """
    return BlockIndex(params).places(move)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one process in one sync.

    local: copied within the process. moved: received from others. sent: sent to others. minimum: the fewest bytes that
    must be received: what the engine needs and the trainer shard on the same process lacks. full_gather: received if
    every process builds the whole model. needed: the engine's parameters. held: the trainer's.
    """

    local: int
    moved: int
    sent: int
    minimum: int
    full_gather: int
    needed: int
    held: int


@dataclass(frozen=True)
class RankPlan:
    """The moves of one process. Moves between two processes have the same order on both."""

    rank: int
    local: tuple[Move, ...]
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


@dataclass(frozen=True)
class Plan:
    """Every move of a sync.

    digest: SHA-256 of the inputs of the plan; equal digests mean equal plans. solved: the moves by bundle of tensors.
    order: HF name -> its position in the order of moves. loads: elements by process.
    """

    digest: str
    solved: tuple[Solved, ...] = field(repr=False)
    order: Mapping[str, int] = field(repr=False)
    loads: Loads = field(repr=False)

    @property
    def num_waves(self) -> int:
        """Number of waves, which run one after another: 1 unless engines forward."""
        return 1 + max((step[3] for one in self.solved for step in one.moves), default=0)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves, ordered by wave, then HF tensor, then rectangle."""
        return self._expanded(None)

    @cached_property
    def _of_rank(self) -> dict[int, RankPlan]:
        return {}

    def _expanded(self, rank: int | None) -> tuple[Move, ...]:
        """The moves that process `rank` sends or receives; all moves for None."""
        moves = [
            Move(name, (r0, r1), None if one.bundle.flat else (c0, c1), source, target, wave)
            for one in self.solved
            for (r0, r1, c0, c1), source, target, wave in one.moves
            if rank is None or rank in (source, target)
            for name in one.names
        ]
        order = self.order
        moves.sort(key=lambda move: (move[5], order[move[0]], move[1], move[2] or (0, 0), move[3], move[4]))
        return tuple(moves)

    def of_rank(self, rank: int) -> RankPlan:
        """The moves of process `rank`; maybe none. Raises ReshardError for a process that is not in the plan."""
        if rank not in self.loads.ranks:
            raise ReshardError(f"process {rank} is not in this plan; its processes: {list(self.loads.ranks)}")
        if rank not in self._of_rank:
            mine = self._expanded(rank)
            self._of_rank[rank] = RankPlan(
                rank,
                local=tuple(move for move in mine if move.source == move.target),
                sends=tuple(move for move in mine if move.source == rank != move.target),
                receives=tuple(move for move in mine if move.source != rank),
            )
        return self._of_rank[rank]

    def bytes_of(self, rank: int, itemsize: int) -> RankBytes:
        """Byte counts of process `rank`. itemsize: bytes of one element in transfer (the engine's dtype)."""
        loads = self.loads
        return RankBytes(
            local=loads.local.get(rank, 0) * itemsize,
            moved=loads.moved.get(rank, 0) * itemsize,
            sent=loads.sent.get(rank, 0) * itemsize,
            minimum=loads.minimum.get(rank, 0) * itemsize,
            full_gather=(loads.total - loads.held.get(rank, 0)) * itemsize,
            needed=loads.needed.get(rank, 0) * itemsize,
            held=loads.held.get(rank, 0) * itemsize,
        )


_PLANS: OrderedDict[str, Plan] = OrderedDict()
_KEPT = 8


def make_plan(
    trainers: Sequence[Shard],
    engines: Sequence[Shard],
    *,
    node_of: NodeOf | None = None,
    gpu_of: NodeOf | None = None,
    dtypes: tuple[str, str] = ("", ""),
) -> Plan:
    """The fewest bytes that give every engine its parameters, as proved moves; the last plans are cached by digest.

    node_of, gpu_of: process -> node and GPU (if not given: one node, a GPU for each process). Sources are chosen among
    replicas: the same process, then the same GPU, then the same node, then the least loaded. Across nodes, and from
    trainers that are not engine processes, a rectangle is sent once and the engines that need it forward it.
    dtypes: (trainer's, engine's), part of the digest.

    Raises ReshardError, naming tensor and interval, if trainers lack a byte that an engine needs, if no engine needs a
    trained byte, if the blocks of a parameter do not fit its shape, or if a tensor's size differs between the sides.
    """
    placement = _placement(trainers, engines, node_of, gpu_of)
    digest = digest_of(trainers, engines, placement, dtypes)
    if digest in _PLANS:
        _PLANS.move_to_end(digest)
        return _PLANS[digest]
    bundles, order = bundles_of(trainers, engines)
    loads = Loads(placement)
    plan = Plan(digest, tuple(solve(bundles, loads)), order, loads)
    _PLANS[digest] = plan
    while len(_PLANS) > _KEPT:
        _PLANS.popitem(last=False)
    return plan


def _placement(
    trainers: Sequence[Shard], engines: Sequence[Shard], node_of: NodeOf | None, gpu_of: NodeOf | None
) -> Placement:
    for side, shards in (("trainer", trainers), ("engine", engines)):
        ranks = [shard.rank for shard in shards]
        if not ranks or len(set(ranks)) != len(ranks):
            raise ReshardError(f"the {side} processes {ranks}: there must be at least one, each listed once")
    held, needed = {shard.rank for shard in trainers}, {shard.rank for shard in engines}
    ranks = sorted(held | needed)
    nodes = {rank: 0 if node_of is None else node_of(rank) for rank in ranks}
    gpus = {rank: rank if gpu_of is None else gpu_of(rank) for rank in ranks}
    return Placement(tuple(ranks), nodes, gpus, colocated=bool(held & needed))


def digest_of(
    trainers: Sequence[Shard], engines: Sequence[Shard], placement: Placement, dtypes: tuple[str, str]
) -> str:
    """SHA-256 over processes, nodes, GPUs, parameter names, shapes, blocks and dtypes: the same on every machine."""
    mark = hashlib.sha256()
    mark.update(repr((dtypes, sorted(placement.nodes.items()), sorted(placement.gpus.items()))).encode())
    known: dict[int, bytes] = {}  # replicas share their tuple of parameters
    for side in (trainers, engines):
        mark.update(b"side")
        for shard in sorted(side, key=lambda one: one.rank):
            if id(shard.params) not in known:
                text = "".join(map(_text, shard.params))
                known[id(shard.params)] = hashlib.sha256(text.encode()).digest()
            mark.update(b"%d:" % shard.rank)
            mark.update(known[id(shard.params)])
    return mark.hexdigest()


def _text(param: LocalParam) -> str:
    blocks = ",".join(f"{block.hf_name}{block.rows}{block.cols}" for block in param.blocks)
    return f"{param.name}{param.shape}{blocks};"


def bundles_of(trainers: Sequence[Shard], engines: Sequence[Shard]) -> tuple[list[Bundle], dict[str, int]]:
    """Tensors with the same rectangles on the same processes, as bundles; and each tensor's position in the order.

    Raises ReshardError if the blocks of a parameter do not fit its shape, or if a tensor is on one side only.
    """
    held, needed = _Side(trainers), _Side(engines)
    _same_tensors(held, needed)
    groups: dict[object, list[str]] = {}
    for name in needed.rects:
        key = (name in needed.flat, tuple(held.rects[name]), tuple(needed.rects[name]))
        groups.setdefault(key, []).append(name)
    bundles = [
        Bundle(tuple(names), len(names), held.owners(names[0]), needed.owners(names[0]), names[0] in needed.flat)
        for names in groups.values()
    ]
    return bundles, {name: place for place, name in enumerate(needed.rects)}


class _Side:
    """The shards of one side by rank. Shards that share their tuple of parameters, as replicas do, are one group.

    rects: HF name -> (group, its rectangles of the tensor) of each group that has any. flat: names of 1-D tensors.
    Groups alone are looked at: a thousand replicas take no longer than one.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.flat: set[str] = set()
        self.rects: dict[str, list[tuple[int, tuple[Rect, ...]]]] = {}
        self._ranks: list[list[int]] = []
        groups: dict[int, int] = {}
        for shard in sorted(shards, key=lambda shard: shard.rank):
            if id(shard.params) not in groups:
                groups[id(shard.params)] = len(self._ranks)
                for name, rects in _rects_of(shard).items():
                    self.rects.setdefault(name, []).append((len(self._ranks), rects))
                self.flat.update(one.hf_name for param in shard.params for one in param.blocks if one.cols is None)
                self._ranks.append([])
            self._ranks[groups[id(shard.params)]].append(shard.rank)

    def owners(self, name: str) -> dict[tuple[Rect, ...], tuple[int, ...]]:
        """Rectangles of a tensor -> the processes that have exactly these."""
        ranks_of: dict[tuple[Rect, ...], list[int]] = {}
        for group, rects in self.rects[name]:
            ranks_of.setdefault(rects, []).extend(self._ranks[group])
        return {rects: tuple(sorted(ranks)) for rects, ranks in ranks_of.items()}


def _rects_of(shard: Shard) -> dict[str, tuple[Rect, ...]]:
    rects_of: dict[str, list[Rect]] = {}
    for param in shard.params:
        _check_blocks(shard.rank, param)
        for block in param.blocks:
            first, last = block.rows
            if first < last:
                left, right = (0, 1) if block.cols is None else block.cols
                rects_of.setdefault(block.hf_name, []).append((first, last, left, right))
    return {name: merge_rects(rects) for name, rects in rects_of.items()}


def _check_blocks(rank: int, param: LocalParam) -> None:
    """Refuse blocks that have more rows than their parameter, or another width."""
    flat = len(param.shape) == 1
    rows, room = sum(block.num_rows for block in param.blocks), param.num_rows
    for block in param.blocks:
        wide = None if block.cols is None else block.cols[1] - block.cols[0]
        if block.num_rows < 0 or wide != (None if flat else param.width):
            raise ReshardError(
                f"process {rank}: {param.name} {list(param.shape)} cannot hold rows {block.rows} cols {block.cols} of "
                f"{block.hf_name}: the shapes differ"
            )
    if rows > room:
        raise ReshardError(
            f"process {rank}: {param.name} {list(param.shape)} has {room} rows, but its blocks "
            f"{[block.hf_name for block in param.blocks]} have {rows}"
        )


def _same_tensors(held: _Side, needed: _Side) -> None:
    missing = [name for name in needed.rects if name not in held.rects]
    surplus = [name for name in held.rects if name not in needed.rects]
    faults = [f"{name} is needed by engine ranks, but on no trainer rank" for name in missing]
    faults += [f"{name} is on trainer ranks, but on no engine rank" for name in surplus]
    if faults:
        raise ReshardError(first_of(faults, 20, "; "))
