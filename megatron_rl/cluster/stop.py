"""Signals: the first asks the run to save and end, a second ends it at once.

Inside `signals` those of SIGNALS raise Stopped, a KeyboardInterrupt, in the main thread, and wait while any thread is
in a `held` block. Nothing heavy is imported: every verb of the command line runs inside.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What job managers send before they end a job."""
SIGNALS = (signal.SIGINT, signal.SIGHUP, *REQUEUE_SIGNALS)
REQUEUE = 75
"""Exit code of a run that was stopped and goes on if the same command is run again (EX_TEMPFAIL of sysexits.h)."""
SAME_S = 0.1
"""Signals this close to the first are the same one: some senders reach the process first, and then its group."""


class Stopped(KeyboardInterrupt):
    """A signal asked to end, or the time is over; the text, where there is one, says what was saved where.

    A class of its own: after a plain KeyboardInterrupt has passed through `exec`, as it does in many an import, Python
    ends with SIGINT's exit code whatever the program returns.
    """

    def __init__(self, text: str = "", can_go_on: bool = False) -> None:
        """can_go_on: the same command goes on from a checkpoint."""
        super().__init__(text)
        self.can_go_on = can_go_on


class _State:
    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.since = 0.0
        """When the signal came, by time.monotonic()."""
        self.held = 0
        self.waits = False
        """A signal came while something was held."""
        self.wakes = False
        """The next call of the handler is the end of what was held, in another thread than the main one."""
        self.commits: bool | None = False
        """Whether the step has committed; None: it may yet; False: there is none, or it is over."""
        self.is_inside = False
        self.notice = ""
        self.lock = threading.RLock()


_state = _State()


@contextmanager
def signals(notice: str = "") -> Iterator[None]:
    """Take SIGNALS for the block; the handlers before it come back. No change outside of the main thread.

    notice: said on standard error at the first signal. A block inside another takes over its notice for a while.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, _state.notice = _state.notice, notice
    if _state.is_inside:
        try:
            yield
        finally:
            _state.notice = outer
        return
    _state.received, _state.waits, _state.wakes, _state.commits = None, False, False, False
    _state.is_inside = True
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            # nohup has SIGHUP ignored: it stays so. Shells have their background jobs ignore SIGINT, and yet one that
            # is sent to such a run asks it to end.
            if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
                signal.signal(number, _take)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.is_inside, _state.notice = False, outer


def received() -> signal.Signals | None:
    """The signal that asked this process to end, if one has."""
    return _state.received


def exit_code(number: signal.Signals | None, can_go_on: bool = False) -> int:
    """128 + the signal's number, as shells count; REQUEUE for a job manager's signals, and where time is over (None),
    if the same command can go on. Time that is over with nothing to go on from is a failure: 2.
    """
    if can_go_on and (number is None or number in REQUEUE_SIGNALS):
        return REQUEUE
    return 2 if number is None else 128 + number


@contextmanager
def held() -> Iterator[None]:
    """Delay a first signal until the block ends, since half of its work is useless. A second signal is not delayed."""
    _hold()
    try:
        yield
    finally:
        _let_go()


@contextmanager
def one_step() -> Iterator[None]:
    """A block that a signal interrupts; after a `commit` inside it, signals are delayed to its end."""
    _state.commits = None
    try:
        yield
    finally:
        commits, _state.commits = _state.commits, False
        if commits:
            _let_go()


def commit() -> None:
    """From here on weights change, so a signal is delayed until the step ends. No effect outside `one_step`."""
    with _state.lock:
        if _state.commits is not None:
            return
        _state.commits = True
    _hold()


def _hold() -> None:
    with _state.lock:
        _state.held += 1


def _let_go() -> None:
    with _state.lock:
        _state.held -= 1
        due = _state.waits and _state.held == 0
        if due:
            _state.waits = False
    if due:
        if threading.current_thread() is threading.main_thread():
            raise Stopped
        _state.wakes = True
        _thread.interrupt_main(_state.received or signal.SIGINT)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the signal handlers after the block, whatever libraries have set inside it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # Also where Python knows of no other: a library may have told the system alone.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def unheard_by_children() -> Iterator[None]:
    """Processes started inside the block never hear a terminal's or a job manager's signals, which go to all at once.

    They are ended by SIGKILL. The signals of this thread wait until the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take(number: int, frame: FrameType | None) -> None:
    state, now = _state, time.monotonic()
    if state.received is None:
        state.received, state.since = signal.Signals(number), now
        _say(f"{state.received.name}: {state.notice}" if state.notice else "")
        if state.held:
            state.waits = True
            return
        raise Stopped
    if state.wakes:
        state.wakes = False
        raise Stopped
    if now - state.since > SAME_S:
        _say(f"{signal.Signals(number).name} again: ending at once")
        os._exit(exit_code(signal.Signals(number)))


def _say(line: str) -> None:
    if line:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
