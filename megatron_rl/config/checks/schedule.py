"""Checks of what happens when: the steps of the run, validation and the learning rate."""

from __future__ import annotations

from megatron_rl.config.durations import seconds_of
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def target_loss(cfg: RunConfig) -> list[Fault]:
    """Only some algorithms stop at a loss."""
    target = cfg.trainer.target_loss
    if target is None or cfg.needs.stops_at_loss:
        return []
    reason = f"only algorithm.name sft stops at a loss, and this run is {cfg.algorithm.name}"
    return [Fault("trainer.target_loss", target, reason, "leave it out, or set algorithm.name=sft")]


def staleness(cfg: RunConfig) -> list[Fault]:
    """Samples are those of the newest weights."""
    staleness = cfg.trainer.max_staleness
    if not staleness:
        return []
    reason = "learning from the samples of older weights is not offered yet: engines and trainer share their memory"
    return [Fault("trainer.max_staleness", staleness, reason, "set it to 0, or leave it out")]


def profile(cfg: RunConfig) -> list[Fault]:
    """What is profiled exists."""
    profile, last = cfg.trainer.profile, cfg.trainer.total_training_steps
    faults: list[Fault] = []
    late = [step for step in profile.steps if last is not None and step > last]
    if late:
        reason = f"the run ends with step {last}"
        faults.append(Fault("trainer.profile.steps", late, reason, f"name steps from 1 to {last}"))
    absent = [rank for rank in profile.ranks if rank >= cfg.world_size]
    if profile.steps and absent:
        reason = f"the run has ranks 0 to {cfg.world_size - 1}"
        faults.append(Fault("trainer.profile.ranks", absent, reason, "name ranks of the run"))
    return faults


def max_time(cfg: RunConfig) -> list[Fault]:
    """The time limit is a length of time."""
    text = cfg.trainer.max_time
    if text is None or seconds_of(text):
        return []
    return [
        Fault("trainer.max_time", text, "is no length of time above 0", 'write 3:50:00, 1-00:00:00 or "90" (minutes)')
    ]


def validation(cfg: RunConfig) -> list[Fault]:
    """Validation that was asked for has data."""
    if cfg.trainer.test_freq <= 0 or cfg.validates:
        return []
    reason = "asks for validation, and data.val_files is empty"
    return [Fault("trainer.test_freq", cfg.trainer.test_freq, reason, "give data.val_files, or set test_freq=0")]


def decay_after_warmup(cfg: RunConfig) -> list[Fault]:
    """The decay of the learning rate ends after its warm-up."""
    optim = cfg.actor.optim
    if optim.lr_decay_steps is None or optim.lr_decay_steps > optim.lr_warmup_steps:
        return []
    reason = f"the decay would end before the warm-up of {optim.lr_warmup_steps} steps does"
    cure = f"use more than {optim.lr_warmup_steps}, or leave it out (the whole run)"
    return [Fault("actor.optim.lr_decay_steps", optim.lr_decay_steps, reason, cure)]


def warmup_ends(cfg: RunConfig) -> list[Fault]:
    """The learning rate reaches its peak within the run, where the run's length is given."""
    steps, warmup = cfg.trainer.total_training_steps, cfg.actor.optim.lr_warmup_steps
    if steps is None or cfg.data.train_batch_size % cfg.mini_batch_size:
        return []
    updates = steps * cfg.updates_per_step
    if warmup <= updates:
        return []
    reason = f"the run has {updates} optimizer steps (trainer.total_training_steps {steps}): lr is never reached"
    return [Fault("actor.optim.lr_warmup_steps", warmup, reason, f"use at most {updates}, or a longer run")]
