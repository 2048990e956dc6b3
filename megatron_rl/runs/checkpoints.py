"""The folder of a run's checkpoints: one is written aside, renamed when it is whole, and found again.

    checkpoints/step_000120/            a whole checkpoint: it has its name only once every byte is on the disk
        actor/ critic/ ranks/           models and optimizers, written by the ranks (workers/checkpoint.py)
        state.json                      step, the run's parts with a state, config, the row of the step
        manifest.json                   size and crc32 of every other file; written last
    checkpoints/step_000130.writing/    one under way; a start removes what a kill has left of it
    checkpoints/latest                  name of the newest one, for a reader

What a kill leaves at any moment is the checkpoint before, or the new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.checks.checkpoint import CHECKPOINT, CHECKPOINTS, MANIFEST_FILE, STATE_FILE
from megatron_rl.config.metrics import better_mode
from megatron_rl.config.sections.checkpoint import CheckpointConfig
from megatron_rl.errors import BrokenCheckpoint, CheckpointError
from megatron_rl.types import FileMark
from megatron_rl.weights.marked_files import sync_folder, write_file

logger = logging.getLogger(__name__)

LATEST = "latest"
FORMAT = 1
UNFINISHED = re.compile(r"step_\d{6,}\.(writing|removing)")
_POINTER = f".{LATEST}.writing"
_MOST_FAULTS = 3


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete: every file has the size that was written."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """Contents of state.json."""
    marks: Mapping[str, FileMark]
    """Every other file, by its name in the folder."""


class StateStore(Protocol):
    """Writes the state of a run's models (runs/trainer.py)."""

    def save_state(self, folder: str, background: bool) -> None:
        """Have the ranks write into the folder; background: from a copy, while the caller goes on."""
        ...

    def save_done(self) -> bool:
        """Whether finish_save would return at once."""
        ...

    def finish_save(self) -> dict[str, FileMark]:
        """Wait for the ranks; what they wrote. Raises CheckpointError and OSError if they could not."""
        ...


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises BrokenCheckpoint with what is wrong with it; checksums of the ranks' files are
    not looked at.
    """
    content = _json(path / MANIFEST_FILE, _bytes(path / MANIFEST_FILE))
    try:
        marks = {name: FileMark(mark["size"], mark["crc32"]) for name, mark in content.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{path}: {MANIFEST_FILE} is no list of files") from error
    faults = [fault for name, mark in marks.items() if (fault := _size_fault(path / name, mark.size))]
    if faults:
        more = f", and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise BrokenCheckpoint(f"{path}: {', '.join(faults[:_MOST_FAULTS])}{more}")
    text = _bytes(path / STATE_FILE)
    if STATE_FILE not in marks or zlib.crc32(text) != marks[STATE_FILE].crc32:
        raise BrokenCheckpoint(f"{path}: {STATE_FILE} has another checksum than when it was written")
    state = _json(path / STATE_FILE, text)
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: has format {state['format']}, and this version reads {FORMAT} -- use the version that wrote it"
        )
    return Checkpoint(path, state["step"], state, marks)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{path.parent}: {path.name} cannot be read ({error})") from error


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BrokenCheckpoint(f"{path.parent}: {path.name} cannot be read ({error})") from error


def _size_fault(file: Path, size: int) -> str:
    try:
        there = file.stat().st_size
    except OSError as error:
        return f"{file.name} is missing ({error.strerror})"
    return "" if there == size else f"{file.name} has {there:,} bytes of {size:,}"


@dataclass(frozen=True)
class Newest:
    """What a folder of checkpoints has to go on from."""

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...]
    """Newer ones that are broken, each with the reason."""


def newest(run_folder: Path, broken: Mapping[Path, str] | None = None) -> Newest:
    """The newest complete checkpoint of a run. broken: folders that are known to be broken -> why."""
    passed_over: list[str] = []
    for path in sorted(checkpoint_folders(run_folder), key=step_of, reverse=True):
        try:
            if broken and path in broken:
                raise BrokenCheckpoint(broken[path])
            return Newest(read_checkpoint(path), tuple(passed_over))
        except BrokenCheckpoint as error:
            passed_over.append(str(error))
    return Newest(None, tuple(passed_over))


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, complete or not."""
    folder = run_folder / CHECKPOINTS
    if not folder.is_dir():
        return []
    return [entry for entry in folder.iterdir() if CHECKPOINT.fullmatch(entry.name) and entry.is_dir()]


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step_"))


@dataclass(frozen=True)
class _UnderWay:
    step: int
    folder: Path
    state: Mapping[str, Any]
    began: float
    held_s: float
    """Seconds that training waited for it."""


class Checkpoints:
    """Writes a run's checkpoints, one at a time, and keeps as many as the config says."""

    def __init__(
        self,
        run_folder: Path,
        cfg: CheckpointConfig,
        store: StateStore,
        say: Callable[[str], None],
        done: Callable[[Path], object] = lambda path: None,
    ) -> None:
        """say: takes a line for a reader. done: takes the folder of each checkpoint once it is whole."""
        self._run_folder, self._folder = run_folder, run_folder / CHECKPOINTS
        self._cfg, self._store, self._say, self._done = cfg, store, say, done
        self._under_way: _UnderWay | None = None
        self._values: dict[int, float] = {}
        """step -> value of checkpoint.keep_best"""
        self.failures = 0
        """Checkpoints that could not be written, in this start of the run."""
        self.last: Path | None = None
        """The newest one that was written in this start."""
        self.longest_s = 0.0
        """Seconds of the slowest one, from its beginning to its name."""

    def clear(self, step: int) -> None:
        """Remove what a kill left half written or half removed, and checkpoints of later steps than `step`: broken
        ones, and those of a branch of the run that is given up.
        """
        (self._folder / _POINTER).unlink(missing_ok=True)
        for path in sorted(self._unfinished()):
            shutil.rmtree(path)
            self._say(f"removed {path}: an earlier start was killed while it wrote or removed it")
        for path in sorted(checkpoint_folders(self._run_folder)):
            if step_of(path) > step:
                self._remove(path)
                self._say(f"removed {path}: the run goes on from step {step}")

    def begin(self, step: int, state: Mapping[str, Any], background: bool) -> Path | None:
        """Write the checkpoint of a step; of one before that is under way the end is waited for.

        background: return once the ranks have a copy. Returns its folder if it is whole by now. A checkpoint that
        cannot be written (a full disk) is said, counted and removed; the ones before stay.
        """
        self.finish()
        start = time.perf_counter()
        folder = self._folder / f"step_{step:06d}.writing"
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            self._store.save_state(str(folder), background)
        except (CheckpointError, OSError) as error:
            self._failed(folder, error)
            return None
        self._under_way = _UnderWay(step, folder, state, start, time.perf_counter() - start)
        return None if background else self.finish()

    def poll(self) -> None:
        """Finish the one under way if the ranks have written it."""
        if self._under_way is not None and self._store.save_done():
            self.finish()

    def finish(self) -> Path | None:
        """Wait for the one under way; its folder, or None if there is none or it could not be written."""
        one, self._under_way = self._under_way, None
        if one is None:
            return None
        start = time.perf_counter()
        try:
            path, size = self._complete(one, self._store.finish_save())
        except (CheckpointError, OSError) as error:
            self._failed(one.folder, error)
            return None
        now = time.perf_counter()
        seconds, held = now - one.began, one.held_s + now - start
        self.longest_s = max(self.longest_s, seconds)
        self.last = path
        self._done(path)
        self._say(f"checkpoint {path}: {size / 2**20:,.1f} MiB in {seconds:.1f} s; training waited {held:.1f} s")
        self._prune()
        return path

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, of which checkpoint.keep_best is one."""
        name = self._cfg.keep_best
        if name is not None and math.isfinite(value := metrics.get(name, math.nan)):
            self._values[step] = value

    def best(self) -> tuple[Path, float] | None:
        """(folder, value) of the best checkpoint that is there by checkpoint.keep_best; None if there is none."""
        paths = {step_of(path): path for path in checkpoint_folders(self._run_folder)}
        step = best_step(sorted(paths), self._values, self._cfg)
        return None if step is None else (paths[step], self._values[step])

    def _complete(self, one: _UnderWay, marks: dict[str, FileMark]) -> tuple[Path, int]:
        """(folder under its own name, bytes)."""
        marks[STATE_FILE] = _write(one.folder / STATE_FILE, one.state)
        listed = {name: {"size": mark.size, "crc32": mark.crc32} for name, mark in sorted(marks.items())}
        _write(one.folder / MANIFEST_FILE, listed)
        # The ranks have synced the folders in it, after their files.
        sync_folder(one.folder)
        target = one.folder.with_suffix("")
        if target.exists():
            self._remove(target)
        one.folder.rename(target)
        sync_folder(self._folder)
        pointer = self._folder / _POINTER
        pointer.write_text(target.name + "\n", encoding="ascii")
        os.replace(pointer, self._folder / LATEST)
        sync_folder(self._folder)
        return target, sum(mark.size for mark in marks.values())

    def _failed(self, folder: Path, error: Exception) -> None:
        self.failures += 1
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        logger.error(
            "THE CHECKPOINT %s COULD NOT BE WRITTEN (%s): it is removed, the ones before it stay, and the run goes on; "
            "%d failed since this start",
            folder.with_suffix(""),
            error,
            self.failures,
        )

    def _prune(self) -> None:
        steps = {step_of(path): path for path in checkpoint_folders(self._run_folder)}
        for step in sorted(steps.keys() - kept(sorted(steps), self._values, self._cfg)):
            self._remove(steps[step])

    def _remove(self, path: Path) -> None:
        """A kill in the middle leaves nothing that looks complete."""
        gone = path.with_suffix(".removing")
        path.rename(gone)
        shutil.rmtree(gone)

    def _unfinished(self) -> Iterator[Path]:
        if self._folder.is_dir():
            yield from (entry for entry in self._folder.iterdir() if UNFINISHED.fullmatch(entry.name))


def kept(steps: list[int], values: Mapping[int, float], cfg: CheckpointConfig) -> set[int]:
    """Those of the checkpoints that stay: the newest ones, and the best. steps: in ascending order."""
    stay = set(steps if cfg.keep_last is None else steps[-cfg.keep_last :])
    best = best_step(steps, values, cfg)
    return stay if best is None else stay | {best}


def best_step(steps: list[int], values: Mapping[int, float], cfg: CheckpointConfig) -> int | None:
    """The one of the steps with the best value; of equals the newest. None if none has a value."""
    rated = [step for step in steps if step in values]
    if cfg.keep_best is None or not rated:
        return None
    sign = 1.0 if better_mode(cfg.keep_best, cfg.best_mode) == "max" else -1.0
    return max(rated, key=lambda step: (sign * values[step], step))


def _write(file: Path, content: Mapping[str, Any]) -> FileMark:
    return write_file(file, json.dumps(content, indent=1).encode())
