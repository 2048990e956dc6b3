"""Section `checkpoint`: what a run writes to be resumed from, and how many of them it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megatron_rl.config.sections.base import section


@section
class CheckpointConfig:
    freq: NonNegativeInt | None = None
    """Steps between checkpoints. Unset: trainer.save_freq where that is above 0, else only when the run is stopped or
    its time is over. 0: never."""
    keep_last: PositiveInt | None = 2
    """Newest checkpoints that are kept; null keeps all."""
    keep_best: str | None = None
    """Metric (val/accuracy, for instance) by which the best checkpoint is kept too, beside the newest ones. Each
    validation then has a checkpoint."""
    best_mode: Literal["max", "min"] | None = None
    """Whether the best value of keep_best is the largest or the smallest; unset: what the metric's name says
    (accuracies and rewards max, losses min)."""
    async_save: bool = True
    """Write checkpoints, and the models of trainer.save_freq, while training goes on, from a copy in host memory. The
    next one waits for it."""
