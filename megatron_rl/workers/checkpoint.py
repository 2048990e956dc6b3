"""One rank's files of a checkpoint: written beside the training by a thread, checked, and read again.

A checkpoint's folder has a folder of tensors for each trained model (weights/dcp.py), named by its role, and in `ranks`
a file of each rank with its random generators. Who makes it complete, and by which names, is runs/checkpoints.py.

The thread writes what the call that began it has copied. Collectives are in the calls alone, never in the thread.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.mcore.checkpoint import SCALARS, WEIGHTS, SavedState, generators, set_generators
from megatron_rl.messages import first_of
from megatron_rl.observe.beat import threads_count
from megatron_rl.parallel.collectives import any_rank, gathered, gathered_by_first
from megatron_rl.types import FileMark
from megatron_rl.weights.dcp import (
    METADATA,
    Chunk,
    SavedTensors,
    WholeTensors,
    WrittenChunk,
    metadata_of,
    tensor_differences,
    write_chunks,
)
from megatron_rl.weights.marked_files import file_faults, naming, sync_folder, write_file
from megatron_rl.workers.records import Role

ResultT = TypeVar("ResultT")

RANKS = "ranks"
Marks = dict[str, FileMark]
"""file, relative to the checkpoint's folder -> its mark"""
Written = tuple[dict[str, list[WrittenChunk]], Marks]
"""where rectangles are, by role; the files"""


def refuse(faults: Sequence[str]) -> None:
    """Raise CheckpointError on all ranks if any has a fault, with the faults of all. A collective."""
    every = list(dict.fromkeys(fault for of_rank in gathered(faults) for fault in of_rank))
    if every:
        raise CheckpointError(first_of(every, 20, "\n"))


def in_background(work: Callable[[], ResultT], name: str) -> Future[ResultT]:
    """Do the work in a thread of its own. name: of the thread."""
    pool = ThreadPoolExecutor(1, name, initializer=_give_way)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def _give_way() -> None:
    """Let what trains go first on every core. Of this thread alone."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@dataclass(frozen=True)
class _Work:
    """What is written: by role, the tensors of one model and what this rank has of them."""

    folder: Path
    rank: int
    models: Mapping[Role, tuple[WholeTensors, Iterable[Chunk]]]
    generators: bytes

    def finished(self) -> Future[Written]:
        """Write now."""
        future: Future[Written] = Future()
        try:
            future.set_result(self.write())
        except CheckpointError as error:
            future.set_exception(error)
        return future

    def write(self) -> Written:
        """Raises CheckpointError."""
        marks: Marks = {}
        written: dict[str, list[WrittenChunk]] = {}
        for role, (_, chunks) in self.models.items():
            name = f"{role}/rank_{self.rank:05d}.distcp"
            _make_folder(self.folder / role)
            written[role], marks[name] = write_chunks(self.folder / name, chunks)
        name = f"{RANKS}/{_rank_file(self.rank)}"
        _make_folder(self.folder / RANKS)
        marks[name] = write_file(self.folder / name, self.generators)
        for folder in [*self.models, RANKS, ""]:
            sync_folder(self.folder / folder)
        return written, marks


class StateFiles:
    """This rank's part of checkpoints: writes one at a time, and reads."""

    def __init__(self, rank: int, world: int, parallel: ParallelConfig) -> None:
        self._rank, self._world, self._layout = rank, world, layout_of(parallel, world)
        self._begun: tuple[_Work, Future[Written]] | None = None
        self._places: dict[str, list[WrittenChunk]] | None = None
        self._metadata: dict[str, bytes] = {}
        """Where rectangles were in the last save, and, on the first rank, what its METADATA files said."""

    def begin(self, folder: Path, models: Mapping[Role, SavedState], background: bool) -> None:
        """Save this rank's share. In the background: copy it, and have a thread write it. Else it is written when this
        returns, and no more host memory is taken than for one parameter. folder: of a new checkpoint. An error comes
        out of `finish`.
        """
        assert self._begun is None, "a checkpoint is begun before the one before it is finished"
        states = io.BytesIO()
        torch.save({"layout": dict(self._layout), "generators": generators()}, states)
        chunks: dict[Role, tuple[WholeTensors, Iterable[Chunk]]] = {
            role: (state.tensors(), state.snapshot() if background else state.stream())
            for role, state in models.items()
        }
        work = _Work(folder, self._rank, chunks, states.getvalue())
        self._begun = work, in_background(work.write, "checkpoint") if background else work.finished()

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait for this rank's thread."""
        return self._begun is None or self._begun[1].done()

    def finish(self) -> Marks:
        """Wait for the files and make the tensors readable; the files that this rank has written. A collective.
        Raises CheckpointError on all ranks, with the error of each.
        """
        if self._begun is None:
            return {}
        work, future = self._begun
        self._begun = None
        written: dict[str, list[WrittenChunk]] = {}
        marks: Marks = {}
        faults: list[str] = []
        try:
            with threads_count():
                written, marks = future.result()
        except CheckpointError as error:
            faults.append(f"rank {self._rank}: {error}")
        refuse(faults)
        # A save differs from the one before in its numbers alone, and much is to be gathered and made anew at size.
        if any_rank(written != self._places):
            self._places, of_ranks = written, gathered_by_first(written)
            faults += self._describe(work, of_ranks) if of_ranks else []
        try:
            for role, data in self._metadata.items():
                marks[f"{role}/{METADATA}"] = write_file(work.folder / role / METADATA, data)
                sync_folder(work.folder / role)
        except CheckpointError as error:
            faults.append(f"rank {self._rank}: {error}")
        refuse(faults)
        return marks

    def _describe(self, work: _Work, of_ranks: Sequence[Mapping[str, list[WrittenChunk]]]) -> list[str]:
        """Make the METADATA of each model, on the first rank; what is wrong with what the ranks have written."""
        self._metadata = {}
        for role, (tensors, _) in work.models.items():
            written = [chunk for of_rank in of_ranks for chunk in of_rank[role]]
            try:
                self._metadata[role] = metadata_of(tensors, written)
            except CheckpointError as error:
                self._places, self._metadata = None, {}
                return [f"{work.folder / role}: {error}"]
        return []

    def faults(self, folder: Path, marks: Mapping[str, FileMark]) -> list[str]:
        """What is wrong with this rank's share of a checkpoint's files."""
        return file_faults(folder, marks, (self._rank, self._world))

    def load(self, folder: Path, models: Mapping[Role, SavedState], to_device: Callable[[Role], None]) -> list[str]:
        """Models, then random generators, from a checkpoint; notes for a reader. to_device: brings a model's memory
        there. A collective. Raises CheckpointError on all ranks; before anything is changed, if the tensors are not
        those of the models.
        """
        saved = open_saved(folder, {role: state.tensors() for role, state in models.items()})
        for role, state in models.items():
            to_device(role)
            read_state(state, saved[role])
        return read_generators(folder, self._rank, self._layout)


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _make_folder(folder: Path) -> None:
    with naming(folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)


def layout_of(parallel: ParallelConfig, world: int) -> dict[str, int]:
    """What two runs have in common if a rank of one does the work of that rank of the other."""
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "vpp": parallel.vpp, "ep": parallel.ep}
    return {"ranks": world, **sizes, "etp": parallel.expert_tp}


def open_saved(folder: Path, models: Mapping[Role, WholeTensors]) -> dict[Role, SavedTensors]:
    """The saved tensors of each model, by role. Raises CheckpointError on all ranks if they are not the model's, naming
    each that is missing, surplus or misshaped. A collective.
    """
    saved: dict[Role, SavedTensors] = {}
    faults: list[str] = []
    for role, tensors in models.items():
        try:
            saved[role] = SavedTensors(folder / role)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        if differences := tensor_differences(saved[role].shapes, tensors, WEIGHTS):
            faults.append(f"{folder / role} is of another model than this {role}: {first_of(differences, 20, '; ')}")
    refuse(faults)
    return saved


def read_state(state: SavedState, saved: SavedTensors) -> None:
    """Fill a model's state, whose memory is on the device, from its saved tensors. A collective. Raises CheckpointError
    on all ranks if a file cannot be read; the model is broken then.
    """
    scalars = {name: torch.zeros((), dtype=torch.int64) for name in SCALARS}
    faults: list[str] = []
    try:
        saved.read([*state.targets(), *(Chunk(name, (), value) for name, value in scalars.items())])
    except CheckpointError as error:
        faults.append(str(error))
    refuse(faults)
    state.loaded({name: int(value) for name, value in scalars.items()})


def read_generators(folder: Path, rank: int, layout: Mapping[str, int]) -> list[str]:
    """Restore this rank's random generators if the checkpoint is of the same layout; else a note that says so."""
    then = _rank_states(folder / RANKS / _rank_file(0))["layout"]
    if then != layout:
        return [
            f"random generators of the ranks start anew: the checkpoint is of {_shown(then)}, this run has "
            f"{_shown(layout)}"
        ]
    set_generators(_rank_states(folder / RANKS / _rank_file(rank))["generators"])
    return []


def _rank_states(path: Path) -> dict[str, Any]:
    with naming(path, "read"):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _shown(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in layout.items() if name == "ranks" or size > 1)
