"""The seam between a worker group and what carries its calls: one rank in this process, or Ray actors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from megatron_rl.cluster.dispatch import Call


@dataclass(frozen=True)
class Answer:
    """One rank's result of one call."""

    value: Any
    seconds: float
    """Time inside the worker's method, measured by the worker."""


class Backend(Protocol):
    """Carries calls to ranks 0..world-1."""

    @property
    def world(self) -> int: ...

    def call(
        self, method: str, calls: Sequence[Call | None], keep: Sequence[bool], timeout_s: float
    ) -> list[Answer | None]:
        """Call the method on each rank whose entry is no None and wait for all of them.

        keep: whether the rank's value is wanted; a value that is not wanted comes back as None.
        A worker's error is raised as itself with its rank in a note. ClusterError if a rank is dead or
        does not answer within timeout_s seconds.
        """
        ...

    def close(self, graceful: bool) -> None:
        """End every rank. graceful: let workers that have a `close` method run it first. Can be called twice."""
        ...


def timed_call(worker: object, method: str, call: Call, keep: bool) -> Answer:
    """Call a worker's method, or that of a component ("train.step"), and measure it."""
    args, kwargs = call
    start = time.perf_counter()
    value = attrgetter(method)(worker)(*args, **kwargs)
    return Answer(value if keep else None, time.perf_counter() - start)


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> object: ...


def close_worker(worker: object) -> None:
    """Run the worker's own `close`, where it has one."""
    if isinstance(worker, _Closable):
        worker.close()
