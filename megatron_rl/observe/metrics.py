"""A step's metrics: sums and counts are kept apart and divided once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol


class SumCount(Protocol):
    """A sum and how much it sums over, such as megatron_rl.types.Metric."""

    @property
    def total(self) -> float: ...
    @property
    def count(self) -> float: ...


class StepMetrics:
    """Collects one step's metrics under slash names (`reward/mean`, `policy/clip_frac`)."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._values: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add a part of a mean: of `count` things whose sum is `total`."""
        if name in self._values:
            raise ValueError(f"metric {name!r} was put as a plain value; it cannot be added to")
        before_total, before_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before_total + float(total), before_count + float(count))

    def merge(self, parts: Mapping[str, SumCount]) -> None:
        """Add each part of a mapping, such as a StepReport's metrics."""
        for name, part in parts.items():
            self.add(name, part.total, part.count)

    def put(self, name: str, value: float) -> None:
        """A number that is no mean, such as a learning rate. Once a step."""
        if name in self._values or name in self._sums:
            raise ValueError(f"metric {name!r} has a value in this step already")
        self._values[name] = float(value)

    def put_all(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.put(name, value)

    def flat(self) -> dict[str, float]:
        """name -> number, sorted. A mean over nothing is NaN, never 0."""
        means = {name: total / count if count else math.nan for name, (total, count) in self._sums.items()}
        return dict(sorted({**means, **self._values}.items()))


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; NaN of nothing."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """`<prefix>/mean`, `/std` (population), `/min`, `/max`; NaN of nothing."""
    mean, std = mean_std(values)
    low, high = (min(values), max(values)) if values else (math.nan, math.nan)
    return {f"{prefix}/mean": mean, f"{prefix}/std": std, f"{prefix}/min": low, f"{prefix}/max": high}
