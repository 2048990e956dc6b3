"""status.json of a run: what the run is doing now, for `megatron-rl status` and other readers of the run's folder.

The file is replaced as a whole, so that a reader never sees half of it. A thread of its own writes it: a disk that is
slow, full or gone delays no step. It is written again every BEAT_S seconds, so that a reader sees since when a run that
was killed is dead.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_rl.errors import DataError

logger = logging.getLogger(__name__)

STATUS_FILE, HALF_STATUS_FILE = "status.json", ".status.json.writing"
FORMAT = 1
STARTING, DONE, STOPPED, FAILED = "starting", "done", "stopped", "failed"
ENDS = (DONE, STOPPED, FAILED)
"""Phases after which nothing follows."""
LEAST_S = 0.25
"""Between two writes."""
BEAT_S = 10.0
STEPS_OF_RATE = 20
"""Newest steps that the rate is the mean of."""
LINES_OF_TROUBLE = 5


@dataclass(frozen=True)
class LastCheckpoint:
    """The newest checkpoint that is complete."""

    path: str
    """Relative to the run's folder."""
    step: int
    time: float
    """When it was complete, in seconds since 1970."""

    @classmethod
    def of(cls, folder: Path, step: int) -> LastCheckpoint:
        """The one in this folder, which is two below the run's."""
        return cls(f"{folder.parent.name}/{folder.name}", step, folder.stat().st_mtime)


@dataclass(frozen=True)
class RunStatus:
    """Contents of status.json. Times are in seconds since 1970."""

    phase: str
    """starting, the nodes of the step's flow that run, validate, save, close; at the end done, stopped or failed."""
    phase_since: float
    step: int
    """Steps that are complete."""
    total: int
    host: str
    pid: int
    started: float
    updated: float
    restarts: int = 0
    """How often the workers of this run were built again."""
    seconds_a_step: float | None = None
    """Mean of the newest steps, with what lies between them; None before the first one."""
    left_s: float | None = None
    checkpoint: LastCheckpoint | None = None
    message: str | None = None
    """Why the run was stopped or failed, or what it says at its end."""
    trouble: list[str] = field(default_factory=list[str])
    """The newest warnings and errors of the controller's log, oldest first."""


def read_status(file: Path) -> RunStatus:
    """Raises FileNotFoundError, or DataError where the file is no status of this format."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise DataError(f"{file}: has another format than {FORMAT}: it is of another version of megatron_rl")
        checkpoint = content.pop("checkpoint")
        return RunStatus(**content, checkpoint=None if checkpoint is None else LastCheckpoint(**checkpoint))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}: is no status of a run ({type(error).__name__}: {error})") from error


class StatusWriter:
    """Keeps status.json of one run. Every method may be called from any thread, and none raises for the disk.

    Nothing is written before `begin`: until then the folder may hold an earlier run.
    """

    def __init__(self, folder: Path) -> None:
        now = time.time()
        self._file = folder / STATUS_FILE
        self._status = RunStatus(STARTING, now, 0, 0, platform.node(), os.getpid(), now, now)
        self._running: list[str] = []
        self._ends = deque([time.monotonic()], maxlen=STEPS_OF_RATE + 1)
        self._lock = threading.Lock()
        self._changed, self._closed = threading.Event(), threading.Event()
        self._is_lost = False
        self._trouble = _Trouble(self._note_trouble)
        self._thread: threading.Thread | None = None
        logging.getLogger().addHandler(self._trouble)

    def begin(self, *, total: int, step: int) -> None:
        """The folder is this run's, and steps begin after `step`. The first call writes the file before it returns."""
        self._ends = deque([time.monotonic()], maxlen=STEPS_OF_RATE + 1)
        with self._lock:
            self._change(replace(self._status, total=total, step=step))
        if self._thread is None and not self._closed.is_set():
            self._write()
            self._thread = threading.Thread(target=self._write_on_change, name="status", daemon=True)
            self._thread.start()

    @contextmanager
    def told_end(self) -> Iterator[None]:
        """The run is over with the block: done, stopped or failed, as it ends."""
        try:
            yield
        except KeyboardInterrupt as error:
            self.close(STOPPED, str(error) or "an interrupt")
            raise
        except BaseException as error:
            self.close(FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        self.close(DONE)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The phase is under way inside the block, beside others that are."""
        self._run_phase(phase, True)
        try:
            yield
        finally:
            self._run_phase(phase, False)

    def step_done(self, step: int) -> None:
        """A step is complete."""
        ends = self._ends
        ends.append(time.monotonic())
        rate = (ends[-1] - ends[0]) / (len(ends) - 1)
        with self._lock:
            left_s = rate * max(self._status.total - step, 0)
            self._change(replace(self._status, step=step, seconds_a_step=rate, left_s=left_s))

    def checkpoint_done(self, checkpoint: LastCheckpoint) -> None:
        """A checkpoint is complete."""
        with self._lock:
            self._change(replace(self._status, checkpoint=checkpoint))

    def tell(self, message: str) -> None:
        """What a reader shall know at the end of the run."""
        with self._lock:
            self._change(replace(self._status, message=message or None))

    def restarted(self, restarts: int) -> None:
        """The workers are built again, for the restarts-th time; `begin` says from where the run goes on."""
        with self._lock:
            self._running.clear()
            self._change(replace(self._status, phase=STARTING, phase_since=time.time(), restarts=restarts))

    def close(self, phase: str, message: str | None = None) -> None:
        """The run is over: phase is one of ENDS, message why. The file is written once more, if it was begun. Later
        calls do nothing.
        """
        if self._closed.is_set():
            return
        self.discard()
        with self._lock:
            self._status = replace(
                self._status, phase=phase, phase_since=time.time(), message=message or self._status.message, left_s=None
            )
        if self._thread is not None and not self._thread.is_alive():
            self._write()

    def discard(self) -> None:
        """Write no more: the run's files are about to be removed."""
        logging.getLogger().removeHandler(self._trouble)
        self._closed.set()
        self._changed.set()
        if self._thread is not None:
            # A disk that hangs must not keep the process; the thread is a daemon.
            self._thread.join(timeout=5.0)

    def _run_phase(self, phase: str, begins: bool) -> None:
        with self._lock:
            if begins:
                self._running.append(phase)
            elif phase in self._running:
                self._running.remove(phase)
            # Between two phases the file keeps the first: that takes no time that anybody sees.
            text = " + ".join(self._running) or self._status.phase
            if text != self._status.phase:
                self._change(replace(self._status, phase=text, phase_since=time.time()))

    def _note_trouble(self, line: str) -> None:
        with self._lock:
            self._change(replace(self._status, trouble=[*self._status.trouble, line][-LINES_OF_TROUBLE:]))

    def _change(self, status: RunStatus) -> None:
        self._status = status
        self._changed.set()

    def _write_on_change(self) -> None:
        while not self._closed.is_set():
            self._changed.wait(timeout=BEAT_S)
            self._changed.clear()
            if not self._closed.is_set():
                self._write()
                self._closed.wait(LEAST_S)

    def _write(self) -> None:
        with self._lock:
            status = self._status = replace(self._status, updated=time.time())
        beside = self._file.with_name(HALF_STATUS_FILE)
        try:
            beside.write_text(json.dumps({"format": FORMAT, **asdict(status)}, indent=2) + "\n", encoding="utf-8")
            os.replace(beside, self._file)
        except OSError as error:
            if not self._is_lost:
                self._is_lost = True
                logger.warning("%s cannot be written (%s): training goes on without it", self._file, error)


class _Trouble(logging.Handler):
    """Hands the text of each warning and error on, without the traceback: the log has that."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        self._note(f"{at} {record.levelname} {record.name}: {record.getMessage()}")
