"""Signs of life of a process: long work says now and then that it goes on, and what it is at.

A rank that gives no beat for cluster.hang_timeout_s, while every other rank waits too, counts as hung
(cluster/watch.py). So whatever may take minutes says `beat("what")` once for each piece of it: a micro-batch, a step of
an engine, a bucket of weights, a tensor of a file. A beat costs less than a microsecond, from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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


def beat(what: str) -> None:
    """The process goes on, with `what`."""
    global _last
    _last = Beat(_last.number + 1, what, time.monotonic())


def last_beat() -> Beat:
    """The last beat, by any thread."""
    return _last


@contextmanager
def unwatched(what: str) -> Iterator[None]:
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
