"""Checks of estimators, losses, filters and rollout correction, and which of their settings a run does not read."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.algos.losses.base import ClipRange
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def group_size(cfg: RunConfig) -> list[Fault]:
    """What compares the samples of a prompt has at least two."""
    if not cfg.needs.rollouts or cfg.rollout.n >= 2:
        return []
    algorithm = cfg.algorithm
    wanting = [f"adv_estimator {algorithm.estimator_name}"] if algorithm.adv_estimator.compares_samples else []
    wanting += ["filter_groups.enable"] if algorithm.filter_groups.enable else []
    wanting += ["drop_flat_groups"] if algorithm.drop_flat_groups else []
    if not wanting:
        return []
    reason = f"{wanting[0]} compares the samples of a prompt, and one sample has nothing to compare with"
    return [Fault("rollout.n", cfg.rollout.n, reason, "use 2 or more (8 is usual)")]


def clip_range(cfg: RunConfig) -> list[Fault]:
    """A ratio is never negative."""
    loss = cfg.actor.loss
    # clip_ratio_low has this bound of its own.
    if not cfg.needs.rollouts or not isinstance(loss, ClipRange) or loss.clip_low <= 1:
        return []
    cure = "use at most 1.0, which does not clip, or give clip_ratio_low"
    return [Fault("actor.loss.clip_ratio", loss.clip_low, "the range below 1 ends at a ratio of 0", cure)]


def overlong_buffer(cfg: RunConfig) -> list[Fault]:
    """The penalty starts within a response."""
    buffer, longest = cfg.algorithm.overlong_buffer, cfg.data.max_response_length
    if not cfg.needs.rollouts or not buffer.enable or buffer.len <= longest:
        return []
    reason = f"is more than data.max_response_length {longest}: every response would be penalised"
    return [Fault("algorithm.overlong_buffer.len", buffer.len, reason, f"use at most {longest}")]


def rollout_correction(cfg: RunConfig) -> list[Fault]:
    """Thresholds leave something, and the bypass has no trainer's log-probabilities to correct with."""
    found, section = cfg.algorithm.rollout_correction, "algorithm.rollout_correction"
    if not cfg.needs.rollouts:
        return []
    faults: list[Fault] = []
    if found.bypass_mode and found.measures_ratio:
        reason = "takes the engine's log-probabilities for the old policy's, which leaves no ratio to correct by"
        cure = "set it to false, or rollout_is, rollout_rs and rollout_token_veto_threshold to null"
        faults.append(Fault(f"{section}.bypass_mode", True, reason, cure))
    if found.rollout_is == "icepop" and found.rollout_is_threshold_lower >= found.rollout_is_threshold:
        reason = f"is not below rollout_is_threshold {found.rollout_is_threshold:g}: no token would have a weight"
        cure = "use 0.5 with a threshold of 5.0, for instance"
        faults.append(Fault(f"{section}.rollout_is_threshold_lower", found.rollout_is_threshold_lower, reason, cure))
    if found.rollout_rs is not None and not found.rejects_below <= 1 <= found.rollout_rs_threshold:
        reason = f"keeps ratios from {found.rejects_below:g} to {found.rollout_rs_threshold:g}, and so not 1"
        cure = "use a threshold above 1, and a lower one below 1 or none"
        faults.append(Fault(f"{section}.rollout_rs_threshold", found.rollout_rs_threshold, reason, cure))
    veto = found.rollout_token_veto_threshold
    if veto is not None and veto >= 1:
        reason = "would leave out nearly every sequence: engine and trainer agree where the ratio is 1"
        faults.append(Fault(f"{section}.rollout_token_veto_threshold", veto, reason, "use a value such as 1e-4"))
    return faults


def unread(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of an RL run that its estimator, loss and filters do not read, and why."""
    if not cfg.needs.rollouts:
        return
    actor, algorithm = cfg.actor, cfg.algorithm
    if not actor.use_kl_loss:
        yield "actor.kl_loss_importance", "actor.use_kl_loss is off"
    if not algorithm.overlong_buffer.enable:
        why = "overlong_buffer.enable is off"
        yield from ((f"algorithm.overlong_buffer.{key}", why) for key in ("len", "penalty_factor"))
    if not algorithm.filter_groups.enable:
        why = "filter_groups.enable is off"
        yield from ((f"algorithm.filter_groups.{key}", why) for key in ("metric", "max_num_gen_batches"))
    yield from ((f"algorithm.rollout_correction.{key}", why) for key, why in _unread_of_correction(cfg))


def _unread_of_correction(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    correction = cfg.algorithm.rollout_correction
    if correction.rollout_is is None:
        yield "rollout_is_threshold", "rollout_is is off"
    if correction.rollout_is != "icepop":
        yield "rollout_is_threshold_lower", "only rollout_is icepop reads it"
    if correction.rollout_rs is None:
        yield from ((key, "rollout_rs is off") for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"))
