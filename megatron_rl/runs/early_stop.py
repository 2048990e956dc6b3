"""The end of a run that no longer improves (trainer.early_stop), and the metrics that choose a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.config.metrics import better_mode
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.trainer import EarlyStopConfig
from megatron_rl.errors import ConfigError, Fault


@dataclass(frozen=True)
class Patience:
    """What the validations so far say: the best one, and how many came after it without an improvement."""

    metric: str | None = None
    mode: str | None = None
    step: int = 0
    """Of the last validation that is counted; 0 before the first."""
    best_step: int = 0
    best: float | None = None
    misses: int = 0

    def after(self, step: int, value: float, min_delta: float) -> Patience:
        """With one more validation; one that is counted changes nothing. NaN and infinity are no improvement."""
        if step <= self.step:
            return self
        sign = 1.0 if self.mode == "max" else -1.0
        improves = math.isfinite(value) and (self.best is None or sign * (value - self.best) > min_delta)
        if improves:
            return replace(self, step=step, best_step=step, best=value, misses=0)
        return replace(self, step=step, misses=self.misses + 1)


class EarlyStop:
    """Counts the validations of a run. Its state is in each checkpoint, written before the step's validation."""

    def __init__(self, cfg: EarlyStopConfig, saved: Mapping[str, Any] | None = None) -> None:
        """saved: the state that a checkpoint has. Of another metric or mode it means nothing, and counts begin anew."""
        self._cfg = cfg
        self._counts = Patience(cfg.metric, better_mode(cfg.metric, cfg.mode) if cfg.metric else None)
        before = None if saved is None else Patience(**saved)
        if before is not None and (before.metric, before.mode) == (self._counts.metric, self._counts.mode):
            self._counts = before

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; those without validation, and those before training, do not count."""
        metric = self._cfg.metric
        if metric is not None and metric in metrics and step > 0:
            self._counts = self._counts.after(step, metrics[metric], self._cfg.min_delta)

    @property
    def ends(self) -> str:
        """Why the run ends now; "" if it does not."""
        counts = self._counts
        if self._cfg.metric is None or counts.misses < self._cfg.patience:
            return ""
        best = (
            "never had a finite value"
            if counts.best is None
            else f"was best at step {counts.best_step} ({counts.best:.6g})"
        )
        since = f"the {counts.misses} validations since" if counts.best is not None else f"{counts.misses} validations"
        return f"{counts.metric} {best}, and {since} did not improve it (trainer.early_stop)"

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self._counts)


def require_metrics(cfg: RunConfig, metrics: Mapping[str, float], of_validation: bool) -> None:
    """Raise ConfigError with the names that there are, if a metric that chooses or ends something is not among them.

    of_validation: the metrics are those of a validation, and not of a step.
    """
    chosen = {
        "checkpoint.keep_best": cfg.checkpoint.keep_best,
        "trainer.early_stop.metric": cfg.trainer.early_stop.metric,
    }
    names = sorted(name for name in metrics if not name.startswith(("time/", "perf/")))
    faults = [
        Fault(key, name, "the run does not measure it", f"use one of {', '.join(names)}")
        for key, name in chosen.items()
        if name is not None and name.startswith("val/") == of_validation and name not in metrics
    ]
    if faults:
        raise ConfigError(faults)
