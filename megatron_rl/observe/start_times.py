"""What a start takes, by phase: on the controller, and on the slowest of its ranks."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

WORKERS, PROCESSES = "workers", "processes"


class StartTimes:
    """Seconds of the phases of a start in this process. A phase within another is taken off the outer one, so that all
    of them add up to the time that passed in the outermost ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        """For each open phase, the seconds of the phases within it."""

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Count the block as `name`; blocks of one name are added up."""
        begun = time.perf_counter()
        self._seconds.setdefault(name, 0.0)
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - begun
            self._seconds[name] += whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, in the order in which the phases began."""
        return dict(self._seconds)


def with_ranks(controller: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The controller's phases, with its wait for the workers divided: into the phases of the rank that took longest,
    and the rest, which is Ray and the start of processes.
    """
    slowest = max(ranks, key=lambda seconds: sum(seconds.values()))
    divided: dict[str, float] = {}
    for name, seconds in controller.items():
        if name == WORKERS:
            divided |= {PROCESSES: max(0.0, seconds - sum(slowest.values())), **slowest}
        else:
            divided[name] = seconds
    return divided


def start_line(seconds: Mapping[str, float]) -> str:
    """Example: start: 48.2 s = data 1.0, processes 3.2, imports 9.1, model 6.4, engine 24.3, first sync 4.2"""
    shown = [f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05]
    return f"start: {sum(seconds.values()):.1f} s" + (f" = {', '.join(shown)}" if shown else "")


def start_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """perf/start_s, and of each phase perf/start_PHASE_s, in seconds."""
    each = {f"perf/start_{name.replace(' ', '_')}_s": value for name, value in seconds.items()}
    return {"perf/start_s": sum(seconds.values())} | each
