"""Seconds by phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up wall seconds by phase; phases may nest, repeat and run in several threads at once.

    clock = Clock()
    with clock("generate"):
        ...
    clock.take()  ->  {"time/generate": 0.42}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure what runs inside, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        with self._lock:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """phase -> seconds since the last `take`."""
        with self._lock:
            return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """`time/<phase>` -> seconds, and start from zero."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}": value for phase, value in seconds.items()}
