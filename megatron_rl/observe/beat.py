"""Signs of life of a process: long work says now and then that it goes on, and what it is at.

A rank that gives no beat for cluster.hang_timeout_s, while every other rank waits too, counts as hung
(cluster/watch.py). So whatever may take minutes says `beat("what")` once for each piece of it: a micro-batch, a step of
an engine, a bucket of weights, a tensor of a file. A beat costs less than a microsecond. The main thread's beats count;
those of others do while it waits for them: a checkpoint that is written in the background hides no hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Beat:
    """The last beat of this process."""

    number: int
    """Beats so far."""
    what: str
    at: float
    """time.monotonic() of the beat."""


_lock = threading.Lock()
_last = Beat(0, "start", time.monotonic())
_unwatched = 0
_threads = 0


def beat(what: str) -> None:
    """The process goes on, with `what`."""
    global _last
    if threading.current_thread() is not threading.main_thread() and not _threads:
        return
    _last = Beat(_last.number + 1, what, time.monotonic())


def last_beat() -> Beat:
    """The last beat that counts."""
    return _last


@contextmanager
def threads_count() -> Generator[None, None, None]:
    """The main thread waits for other threads, whose beats count meanwhile."""
    global _threads
    with _lock:
        _threads += 1
    try:
        yield
    finally:
        with _lock:
            _threads -= 1


@contextmanager
def unwatched(what: str) -> Generator[None, None, None]:
    """Work that cannot say that it goes on, such as a call of someone else's code: in it, a process that lives counts
    as one that goes on. The call's own deadline (cluster.step_timeout_s) stays.
    """
    global _unwatched
    beat(what)
    with _lock:
        _unwatched += 1
    try:
        yield
    finally:
        with _lock:
            _unwatched -= 1
        beat(f"after {what}")


def is_unwatched() -> bool:
    """Whether any thread is in a block of `unwatched`."""
    return _unwatched > 0
