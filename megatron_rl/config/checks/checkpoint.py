"""Checks of checkpoints and of resuming from them."""

from __future__ import annotations

from megatron_rl.config.durations import seconds_of
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def best_metric(cfg: RunConfig) -> list[Fault]:
    """The metric that chooses the best checkpoint is measured when checkpoints are written."""
    metric = cfg.checkpoint.keep_best
    if metric is None or not metric.startswith("val/") or (cfg.data.val_files and cfg.trainer.test_freq):
        return []
    reason = "is a metric of validation, and this run does not validate"
    return [
        Fault("checkpoint.keep_best", metric, reason, "give data.val_files and trainer.test_freq, or another metric")
    ]


def not_offered_yet(cfg: RunConfig) -> list[Fault]:
    """Keys whose work is not done yet are refused, not passed over."""
    trainer, checkpoint = cfg.trainer, cfg.checkpoint
    asked: list[tuple[str, object, bool]] = [
        ("trainer.resume_mode", trainer.resume_mode, trainer.resume_mode not in ("auto", "disable")),
        ("trainer.resume_changes", trainer.resume_changes, bool(trainer.resume_changes)),
        ("trainer.max_time", trainer.max_time, bool(seconds_of(trainer.max_time or ""))),
        ("trainer.max_restarts", trainer.max_restarts, trainer.max_restarts > 0),
        ("checkpoint.freq", checkpoint.freq, bool(checkpoint.freq)),
    ]
    reason = "checkpoints are not offered yet"
    return [Fault(key, value, reason, "leave it out") for key, value, is_asked in asked if is_asked]
