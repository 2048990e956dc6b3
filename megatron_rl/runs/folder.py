"""The folder of one run: who may use it, and which files of an earlier run go when another takes its place.

A run claims its folder before anything else and begins it when its first step is about to start. Until then an earlier
run in it stays as it was, to the byte and the time of change; a claim that is given up leaves nothing behind. The
lock is the kernel's (flock), not the file's presence: it ends with the process that holds it, on any host that shares
the file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron_rl.config.checks.checkpoint import CHECKPOINT, CHECKPOINTS, MANIFEST_FILE, STATE_FILE
from megatron_rl.config.checks.folders import NAME_KEY, nearest_folder
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.observe.run_status import HALF_STATUS_FILE, STATUS_FILE

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
FILES = (
    "config.yaml",
    "run.json",
    STATUS_FILE,
    HALF_STATUS_FILE,
    "metrics.jsonl",
    "rollouts.jsonl",
    "curves.png",
    "wandb_id",
    "mlflow_id",
)
MODELS = ("final", "critic")
"""Folders of saved models; a step's are below STEP."""
STEP = re.compile(r"global_step_\d+")
STEP_MODELS = ("actor", "critic")
LOGS = {
    "tensorboard": ("events.out.tfevents.*",),
    "wandb": ("run-*", "offline-run-*", "latest-run", "debug*.log", "settings"),
}
"""Folders of loggers, and what those write there."""
UNFINISHED = re.compile(r"\.(final|actor|critic)\.[0-9a-f]{8}\.(writing|old)")
"""What a save that was killed leaves beside its folder (weights/safetensors.py)."""
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
CHECKPOINT_ENTRIES = (*STEP_MODELS, "ranks", STATE_FILE, MANIFEST_FILE)
MOST_NUMBERS = 9999
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class RunFolder:
    """A claimed folder. `begin` it once, then write; leaving the `with` gives the claim up."""

    def __init__(self, path: Path) -> None:
        """Lock the folder, which is made where it is missing. BlockingIOError where another run holds the lock."""
        self.path = path
        self.is_begun = False
        self._made: list[Path] = []
        """What was made for the claim, outermost first."""
        beside = nearest_folder(path)
        self._times = (beside, os.stat(beside))
        self._lock = self._locked()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def begin(self, goes_on: bool = False) -> None:
        """From now on the folder holds this run. What an earlier run wrote here is removed, unless this goes on."""
        if not goes_on:
            remove_run(self.path)
        self.is_begun = True

    def release(self) -> None:
        """Give the lock back. A folder that was not begun is left as it was found."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        if not self.is_begun and self._made:
            with contextlib.suppress(OSError):  # someone else's file came into it meanwhile
                for made in reversed(self._made):
                    made.unlink() if made.name == LOCK_FILE else made.rmdir()
            beside, before = self._times
            os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.close(lock)

    def _locked(self) -> int | None:
        file = self.path / LOCK_FILE
        while True:
            self._make_folder()
            is_new = not file.exists()
            try:
                lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # another run has just given the folder up
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning("%s: this file system has no locks: two runs in one folder would not notice", file)
                lock = os.open(file, os.O_RDONLY)
            # The file may have been removed, and made again, by others since it was opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(file)):
                    self._made += [file] if is_new else []
                    return lock
            os.close(lock)

    def _make_folder(self) -> None:
        missing: list[Path] = []
        path = self.path
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                self._made.append(folder)


def claim(trainer: TrainerConfig, goes_on: bool = False, why_not: str = "") -> RunFolder:
    """The folder that the run may use, as trainer.overwrite says; nothing in it has changed.

    goes_on: the run in it is taken up again. why_not: why that cannot be, where the folder holds one.
    Raises ConfigError where it holds a run and shall not be replaced, where another run uses it, or where things that
    no run writes lie in folders that would be replaced.
    """
    asked = Path(trainer.run_dir)
    if goes_on:
        return _locked(trainer, asked)
    if trainer.overwrite != "number":
        return _claim_one(trainer, asked, why_not)
    for path in numbered(asked):
        if not holds_run(path):
            with contextlib.suppress(BlockingIOError):
                folder = RunFolder(path)
                if not holds_run(path):
                    return folder
                folder.release()
    reason = f"{asked} and {asked.name}-2 to {asked.name}-{MOST_NUMBERS} hold runs"
    raise ConfigError([Fault(NAME_KEY, trainer.experiment_name, reason, "give the run another name")])


def _claim_one(trainer: TrainerConfig, path: Path, why_not: str) -> RunFolder:
    faults = _faults(trainer, path, why_not)
    if faults:
        raise ConfigError(faults)
    folder = _locked(trainer, path)
    # A run may have begun and ended between the first look and the lock.
    faults = _faults(trainer, path, why_not)
    if faults:
        folder.release()
        raise ConfigError(faults)
    return folder


def _locked(trainer: TrainerConfig, path: Path) -> RunFolder:
    try:
        return RunFolder(path)
    except BlockingIOError:
        reason = f"another run uses the folder {path} now{_who(path / LOCK_FILE)}"
        cure = "wait for it to end, or give this run another name"
        raise ConfigError([Fault(NAME_KEY, trainer.experiment_name, reason, cure)]) from None


def _faults(trainer: TrainerConfig, path: Path, why_not: str) -> list[Fault]:
    if trainer.overwrite == "replace":
        reason = "is no file of a run, and lies in a folder that this run would replace"
        return [Fault("trainer.overwrite", "replace", f"{odd} {reason}", "move it away") for odd in strangers(path)]
    if not holds_run(path):
        return []
    cure = (
        "set trainer.overwrite=replace to give its files up, trainer.overwrite=number to keep it and call this run "
        f"{path.name}-2 or the next free number, or give the run another name"
    )
    longer = "to go on, raise trainer.total_training_steps; or " if why_not.startswith("that ") else ""
    reason = f"{path} holds a run already{f', {why_not}' if why_not else ''}"
    return [Fault(NAME_KEY, trainer.experiment_name, reason, longer + cure)]


def holds_run(path: Path) -> bool:
    """Whether anything in the folder has a name that a run writes under."""
    return any(True for _ in _entries(path))


def remove_run(path: Path) -> None:
    """Remove what a run writes in the folder, and nothing else: folders go once they are empty."""
    for entry in sorted(_entries(path)):
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        elif entry.name in LOGS:
            for found in _logs(entry):
                shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()
            _remove_empty(entry)
        elif STEP.fullmatch(entry.name):
            for model in _step_models(entry):
                shutil.rmtree(model)
            _remove_empty(entry)
        elif entry.name == CHECKPOINTS:
            for found in _checkpoints(entry):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
            _remove_empty(entry)
        else:
            shutil.rmtree(entry)


def remove_unfinished(path: Path) -> list[str]:
    """Remove what killed saves of models have left; a line for each."""
    lines: list[str] = []
    steps = [entry for entry in path.iterdir() if STEP.fullmatch(entry.name) and entry.is_dir()]
    for entry in sorted(one for folder in (path, *steps) for one in folder.iterdir()):
        if UNFINISHED.fullmatch(entry.name) and entry.is_dir():
            shutil.rmtree(entry)
            lines.append(f"removed {entry}: an earlier start was killed in this save")
    return lines


def strangers(path: Path) -> list[Path]:
    """What no run writes, and a replacement of the folder's run would take along."""
    found: list[Path] = []
    for entry in sorted(_entries(path)):
        if entry.is_symlink() or UNFINISHED.fullmatch(entry.name):
            continue
        if entry.name in FILES:
            found += [entry] if entry.is_dir() else []
        elif not entry.is_dir():
            found.append(entry)
        elif entry.name == CHECKPOINTS:
            found += [file for one in _checkpoints(entry) if one.is_dir() for file in _odd_in_checkpoint(one)]
        elif entry.name not in LOGS:
            for model in _step_models(entry) if STEP.fullmatch(entry.name) else [entry]:
                files = () if UNFINISHED.fullmatch(model.name) else sorted(model.iterdir())
                found += [file for file in files if not _is_model_file(file)]
    return found


def _entries(path: Path) -> Iterator[Path]:
    """What of a run lies in the folder: its files, and folders that hold something of it."""
    if not path.is_dir():
        return
    for entry in path.iterdir():
        name = entry.name
        if name in FILES or name in MODELS or UNFINISHED.fullmatch(name):
            yield entry
        elif name in LOGS:
            if not entry.is_dir() or _logs(entry):
                yield entry
        elif (STEP.fullmatch(name) and (not entry.is_dir() or _step_models(entry))) or (
            name == CHECKPOINTS and (not entry.is_dir() or _checkpoints(entry))
        ):
            yield entry


def _logs(folder: Path) -> list[Path]:
    patterns = LOGS[folder.name]
    return [entry for entry in folder.iterdir() if any(fnmatch.fnmatch(entry.name, one) for one in patterns)]


def _checkpoints(folder: Path) -> list[Path]:
    """What runs/checkpoints.py writes, whole and unfinished."""
    names = re.compile(rf"{CHECKPOINT.pattern}(\.writing|\.removing)?|latest|\.latest\.writing")
    return [entry for entry in folder.iterdir() if names.fullmatch(entry.name) and not entry.is_symlink()]


def _step_models(folder: Path) -> list[Path]:
    names = [entry for entry in folder.iterdir() if entry.name in STEP_MODELS or UNFINISHED.fullmatch(entry.name)]
    return [entry for entry in names if entry.is_dir()]


def _odd_in_checkpoint(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if entry.name not in CHECKPOINT_ENTRIES]


def _is_model_file(file: Path) -> bool:
    return file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in MODEL_FILES)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in range(2, MOST_NUMBERS + 1):
        yield path.with_name(f"{path.name}-{number}")


@dataclass(frozen=True)
class LockHolder:
    """Who holds the lock of a run's folder."""

    is_locked: bool
    pid: int | None = None
    """Where the process is on this host."""
    has_locks: bool = True
    """Whether the file system has locks; if not, is_locked is False."""


def lock_holder(path: Path) -> LockHolder:
    """Who holds the lock of the folder now. Nothing is changed to find out."""
    file = path / LOCK_FILE
    pid = _local_holder(file)
    if pid is not None:
        return LockHolder(True, pid)
    # A holder on another host, or in another container, is not in the kernel's list.
    try:
        probe = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return LockHolder(False)
    try:
        fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockHolder(True)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return LockHolder(False, has_locks=False)
    finally:
        os.close(probe)
    return LockHolder(False)


def _local_holder(file: Path) -> int | None:
    """The process that holds the lock, by the kernel's list, where it is on this host."""
    try:
        inode = os.stat(file).st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and int(fields[4]) > 0:
                return int(fields[4])
    except (OSError, IndexError, ValueError):
        pass
    return None


def _who(lock: Path) -> str:
    """ " (process 12)" where the process is on this host."""
    pid = _local_holder(lock)
    return "" if pid is None else f" (process {pid})"
