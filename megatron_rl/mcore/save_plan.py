"""Which rank writes which tensors of a saved model into which file. Pure: every rank makes the same plan.

A rank writes what it has: a tensor that several ranks hold parts of goes to one of them, and to no other. Bytes are
dealt evenly to as many ranks of a pipeline stage as there are files to write. Where files have the experts of a layer
as one tensor (models/stacks.py), one rank writes it, and gets the experts of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.models.rules import LocalParam
from megatron_rl.models.stacks import by_stack, member_of, stacked_shapes
from megatron_rl.parallel.topology import Coords, Topology
from megatron_rl.weights.shard_files import TensorEntry, cut_to_size, shard_names

ShardsOf = Callable[[int, int], Iterable[tuple[LocalParam, ...]]]
"""(stage, chunk) -> each parameter as the ranks of its group hold it"""


@dataclass(frozen=True)
class SavedPiece:
    """A parameter, or an expert of a stack, and the ranks that bring it to its writer.

    holders: global rank -> its shard; they send theirs to the writer, unless they are it. entries: of the tables.
    """

    chunk: int
    number: int
    """The expert's number in the rank's stack."""
    holders: Mapping[int, LocalParam]
    writer: int
    entries: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class SavePlan:
    """Pieces in the order in which ranks bring them together, and each rank's files in the order they are written."""

    pieces: tuple[SavedPiece, ...]
    files: Mapping[int, Mapping[str, tuple[TensorEntry, ...]]]

    @property
    def all_files(self) -> dict[str, tuple[TensorEntry, ...]]:
        """The files of all ranks."""
        return {name: entries for of_rank in self.files.values() for name, entries in of_rank.items()}


def plan_save(
    topology: Topology,
    vpp: int,
    shards_of: ShardsOf,
    saved: Mapping[str, TensorEntry],
    shard_bytes: int,
) -> SavePlan:
    """The plan of a model. saved: tensors by name; others are left out."""
    pieces: list[SavedPiece] = []
    load = _Load([0] * topology.world, {})
    done: set[str] = set()
    for stage in range(topology.pp):
        parts = [part for chunk in range(vpp) for part in _parts(stage, chunk, shards_of)]
        entries_of = [_entries(shards, saved, done) for _, _, shards in parts]
        total = sum(entry.num_bytes for entries in entries_of for entry in entries)
        ranks = topology.world // topology.pp
        first = stage * ranks
        # As many writers as there are files: a small model is one file however many ranks hold it.
        writers = range(first, first + min(ranks, max(1, -(-total // shard_bytes))))
        for (chunk, number, shards), entries in zip(parts, entries_of, strict=True):
            if entries:
                pieces.append(_piece(topology, stage, chunk, number, shards, entries, writers, load))
    by_rank = {
        rank: cut_to_size(_of_files(one for one in pieces if one.writer == rank), shard_bytes)
        for rank in sorted({one.writer for one in pieces})
    }
    names = iter(shard_names(sum(len(files) for files in by_rank.values())))
    return SavePlan(tuple(pieces), {rank: {next(names): one for one in files} for rank, files in by_rank.items()})


@dataclass(frozen=True)
class _Load:
    """What ranks have to write so far: bytes by rank, and the writer of each stack."""

    bytes_of: list[int]
    stacks: dict[str, int]


def _of_files(pieces: Iterable[SavedPiece]) -> list[TensorEntry]:
    """What files have of the pieces of one writer."""
    known = {entry.name: entry for piece in pieces for entry in piece.entries}
    dtypes = {stack: known[names[0]].dtype for stack, names in by_stack(known)}
    shapes = stacked_shapes({name: entry.shape for name, entry in known.items()})
    return [TensorEntry(name, shape, dtypes[name]) for name, shape in shapes.items()]


def _parts(stage: int, chunk: int, shards_of: ShardsOf) -> Iterator[tuple[int, int, dict[int, LocalParam]]]:
    """(chunk, expert's number, the shards that are parts of the same tensors by their place in the group)."""
    for shards in shards_of(stage, chunk):
        for number, pieces in enumerate(zip(*(shard.experts() for shard in shards), strict=True)):
            together: dict[tuple[str, ...], dict[int, LocalParam]] = {}
            for place, piece in enumerate(pieces):
                names = tuple(dict.fromkeys(block.hf_name for block in piece.blocks))
                together.setdefault(names, {})[place] = piece
            for of_names in together.values():
                yield chunk, number, of_names


def _entries(
    shards: Mapping[int, LocalParam], saved: Mapping[str, TensorEntry], done: set[str]
) -> tuple[TensorEntry, ...]:
    """What is saved of a piece; nothing of the copy of an embedding that the last stage of a tied model holds."""
    first = next(iter(shards.values()))
    names = [name for name in dict.fromkeys(block.hf_name for block in first.blocks) if name in saved]
    new = tuple(saved[name] for name in names if name not in done)
    done.update(names)
    return new


def _piece(
    topology: Topology,
    stage: int,
    chunk: int,
    number: int,
    shards: Mapping[int, LocalParam],
    entries: tuple[TensorEntry, ...],
    writers: range,
    load: _Load,
) -> SavedPiece:
    """The piece with its writer: of the ranks that hold a shard of it, the one with the least to write; or the one that
    writes other experts of its stack.
    """
    expert = next(iter(shards.values())).expert
    copies = [_holders(topology, stage, list(shards), expert, copy) for copy in range(_copies(topology, expert))]
    candidates = [(rank, of_copy) for of_copy in copies for rank in of_copy]
    near = [one for one in candidates if one[0] in writers]
    writer, of_copy = min(near or candidates, key=lambda one: (load.bytes_of[one[0]], one[0]))
    member = member_of(entries[0].name)
    if member is not None:
        writer = load.stacks.setdefault(member.stack, writer)
        of_copy = next((of_copy for of_copy in copies if writer in of_copy), of_copy)
    load.bytes_of[writer] += sum(entry.num_bytes for entry in entries)
    holders = dict(zip(of_copy, shards.values(), strict=True))
    nearest = writer if writer in holders else of_copy[0]
    if all(shard.blocks == holders[nearest].blocks for shard in holders.values()):
        holders = {nearest: holders[nearest]}
    return SavedPiece(chunk, number, holders, writer, entries)


def _copies(topology: Topology, expert: bool) -> int:
    return topology.edp if expert else topology.dp * topology.cp


def _holders(topology: Topology, stage: int, places: list[int], expert: bool, copy: int) -> list[int]:
    """Global ranks of the places of a group, in one of its copies."""
    if expert:
        first = (stage * topology.edp + copy) * topology.ep * topology.expert_tp
        return [first + place for place in places]
    cp, dp = copy % topology.cp, copy // topology.cp
    return [topology.rank(Coords(tp=place, cp=cp, dp=dp, pp=stage)) for place in places]
