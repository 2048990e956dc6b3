"""The watchdog of a rank: a thread that tells the controller, now and then, what the rank is at.

What it tells is a Sign, kept in the cluster's key-value store, where it outlives the rank and its node. Once a call
has gone on without a beat (observe/beat.py) for too long, or is about to miss its deadline, the Sign holds the stacks
of all threads. The controller reads the Signs of a call only if that takes long (cluster/watch_lookout.py).
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from megatron_rl.observe.beat import beat, is_unwatched, last_beat, threads_count
from megatron_rl.observe.log import last_line

MOST_FRAMES = 40
"""Innermost frames of a thread that a Sign holds."""
LONGEST_PERIOD_S = 5.0
FIRST_S = 0.5
"""A call that is over by then costs no Sign."""


def period_s(quiet_s: float) -> float:
    """Seconds between two Signs of a rank, if it counts as hung after quiet_s."""
    return min(LONGEST_PERIOD_S, max(0.2, quiet_s / 20))


@dataclass(frozen=True)
class Watch:
    """How one call is watched."""

    call: int
    """Number of the call, in the order of the group's calls."""
    quiet_s: float
    """Seconds without a beat after which the rank says where it is."""
    late_s: float
    """Seconds after which it says so in any case, since the deadline is near."""


@dataclass(frozen=True)
class Sign:
    """What a rank is at, as it was when the Sign was written."""

    call: int
    tick: int
    """Counts the Signs of the process: one that stands still is of a process that is stopped, or gone."""
    beats: int
    """Beats of the process so far."""
    what: str
    """The last beat."""
    age_s: float
    """Seconds since the last beat."""
    line: str
    """The last log line of the process."""
    oom_kills: int
    """Processes that the kernel has killed for memory on the node (watch_probe.oom_kills)."""
    stack: tuple[str, ...] = ()
    """Frames of the main thread, which does the work; the innermost is the last. Empty until it takes too long."""
    threads: str = ""
    """Stacks of all other threads of Python, for a reader."""
    collective: str = ""
    """On GPUs: the oldest collective that the process has queued and that has not ended."""

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Sign:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return Sign(**{**values, "stack": tuple(values["stack"])})


class Watchdog:
    """Watches the calls of this process, one at a time, from a thread of its own: the main thread may hang."""

    def __init__(self, store: Callable[[str], None], oom_kills: Callable[[], int]) -> None:
        """store: keeps the text of a Sign where the controller finds it."""
        self._store, self._oom_kills = store, oom_kills
        self._changed = threading.Condition()
        self._watch: Watch | None = None
        self._since = 0.0
        self._tick = 0
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, watch: Watch, method: str) -> Iterator[None]:
        """A call of the method."""
        beat(f"begin of {method}")
        with self._changed:
            self._watch, self._since = watch, time.monotonic()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._watch = None
                self._changed.notify_all()

    def _run(self) -> None:
        told = -1
        while True:
            watch, since = self._next()
            if self._is_over(watch, FIRST_S):
                continue
            while True:
                self._store(self._sign(watch, since, told).to_json())
                told = last_beat().number
                late_in_s = watch.late_s - (time.monotonic() - since)
                if self._is_over(watch, min(period_s(watch.quiet_s), late_in_s if late_in_s > 0.0 else math.inf)):
                    break

    def _next(self) -> tuple[Watch, float]:
        """(the call that is under way, its start), once there is one."""
        with self._changed:
            while self._watch is None:
                self._changed.wait()
            return self._watch, self._since

    def _is_over(self, watch: Watch, within_s: float) -> bool:
        """Wait so long; whether the call has ended by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._watch is not watch, timeout=within_s)
            return self._watch is not watch

    def _sign(self, watch: Watch, since: float, told: int) -> Sign:
        last, now = last_beat(), time.monotonic()
        if is_unwatched() and last.number == told:
            with threads_count():
                beat(last.what)
            last = last_beat()
        self._tick += 1
        sign = Sign(watch.call, self._tick, last.number, last.what, now - last.at, last_line(), self._oom_kills())
        if sign.age_s < watch.quiet_s and now - since < watch.late_s:
            return sign
        stack, threads = all_stacks()
        return replace(sign, stack=stack, threads=threads, collective=_pending_collective())


def all_stacks() -> tuple[tuple[str, ...], str]:
    """(frames of the main thread, the stacks of all others as text)."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [
        "\n".join([f"thread {names.get(ident, ident)}:", *(f"  {line}" for line in _lines(frame))])
        for ident, frame in frames.items()
        if ident not in (main, threading.get_ident())
    ]
    return _lines(frames[main]) if main in frames else (), "\n".join(others)


def _lines(frame: FrameType) -> tuple[str, ...]:
    """ "path:12 in function: its code" of each frame."""
    frames = traceback.extract_stack(frame)[-MOST_FRAMES:]
    return tuple(f"{_short(one.filename)}:{one.lineno} in {one.name}: {one.line}" for one in frames)


def _short(path: str) -> str:
    """A path from the package's own folder on."""
    parts = Path(path).parts
    return str(Path(*parts[parts.index("site-packages") + 1 :])) if "site-packages" in parts else path


def oldest_pending(trace: str) -> str:
    """Of a dump of NCCL's flight recorder: the oldest collective that was queued and has not ended; "" if none."""
    entries = json.loads(trace).get("entries", [])
    if not entries:
        return ""
    oldest = min(entries, key=lambda entry: entry["time_created_ns"])
    number = oldest["p2p_seq_id"] if oldest["is_p2p"] else oldest["collective_seq_id"]
    return f"{oldest['profiling_name']} {number} of {oldest['process_group'][1]}, sizes {oldest['input_sizes']}"


def _pending_collective() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    from torch._C._distributed_c10d import _dump_nccl_trace_json  # pyright: ignore[reportAttributeAccessIssue]

    return oldest_pending(_dump_nccl_trace_json(True, True).decode())
