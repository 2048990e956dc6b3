"""A bound on how far the engine's log-probabilities may be from the trainer's, for the same weights and tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import RolloutError

_log = logging.getLogger(__name__)


class MismatchGuard:
    """Warns of each step whose mean |log p_engine - log p_trainer| is above algorithm.max_mismatch, and ends the run at
    the algorithm.max_mismatch_steps-th such step in a row. A log-probability that is not finite counts as above.
    """

    def __init__(self, cfg: RunConfig) -> None:
        # An engine without a model makes its log-probabilities up.
        self._limit = cfg.algorithm.max_mismatch if cfg.engine.runs_model else None
        self._steps = cfg.algorithm.max_mismatch_steps
        self.above = 0
        """Steps in a row that were above."""

    def state(self) -> dict[str, int]:
        """What a resumed run needs."""
        return {"above": self.above}

    def restore(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self.above = state["above"]

    def look(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """metrics: those of algos.correction.mismatch_metrics, among others. Returns mismatch/steps_above; raises
        RolloutError where the run ends.
        """
        mean, broken = metrics.get("mismatch/abs_mean", 0.0), metrics.get("mismatch/nonfinite_tokens", 0.0)
        if self._limit is None:
            return {}
        if mean <= self._limit and not broken:
            self.above = 0
            return {"mismatch/steps_above": 0.0}
        self.above += 1
        what = (
            f"step {step}: the engine's log-probabilities are {mean:.3g} nats from the trainer's (mean of |difference| "
            f"over sampled tokens; the largest is {metrics.get('mismatch/abs_max', 0.0):.3g}; {broken:.0f} tokens are "
            f"not finite), and algorithm.max_mismatch is {self._limit:g}"
        )
        if self.above >= self._steps:
            raise RolloutError(
                f"{what}; so it was in {self.above} steps in a row (algorithm.max_mismatch_steps) -- the engine "
                "samples from another model than the one that is trained: look at config.json, rollout.dtype and the "
                "engine's warnings, compare with rollout.name=hf, or raise algorithm.max_mismatch (null turns "
                "the bound off)"
            )
        _log.warning("%s; the run ends at %d such steps in a row (this is %d)", what, self._steps, self.above)
        return {"mismatch/steps_above": float(self.above)}
