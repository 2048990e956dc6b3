"""Select the tokens that are trained on: the length penalty, sequences left out of the loss, rollout correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algos.correction import Correction, correct_rollouts
from megatron_rl.algos.filters import overlong_penalty
from megatron_rl.algos.groups import sequence_sums
from megatron_rl.config.run import RunConfig
from megatron_rl.types import RolloutGroup, TrainBatch


def length_penalties(cfg: RunConfig, response_lens: torch.Tensor) -> torch.Tensor:
    """[S] float64 added to scores for length (algorithm.overlong_buffer); 0 where that is off."""
    buffer = cfg.algorithm.overlong_buffer
    if not buffer.enable:
        return torch.zeros(len(response_lens), dtype=torch.float64)
    return overlong_penalty(response_lens, cfg.data.max_response_length, buffer.len, buffer.penalty_factor)


def response_lens(batch: TrainBatch) -> torch.Tensor:
    """[S] float64: sampled tokens of each sequence."""
    return sequence_sums(batch.loss_mask, batch.segments, batch.num_sequences)


@dataclass(frozen=True)
class Shaped:
    """The sequences and tokens of a batch that the update trains on."""

    kept: torch.Tensor
    """[S] bool: sequences with any trained token"""
    mask: torch.Tensor
    """[T] bool: the trained tokens"""
    columns: dict[str, torch.Tensor]
    """rollout_weights, where rollout correction gives weights"""
    counts: dict[str, float]
    """what was left out, and why"""


def leave_out(
    cfg: RunConfig,
    batch: TrainBatch,
    groups: Sequence[RolloutGroup],
    dropped: torch.Tensor,
    old_logprobs: torch.Tensor | None,
) -> Shaped:
    """Sequences `dropped` [S] (flat groups), truncated ones if asked, and what rollout correction rejects."""
    segments = batch.segments
    counts = {"groups/dropped": float(dropped.sum()) / len(groups[0].rollouts)}
    if cfg.algorithm.overlong_buffer.enable:
        counts["reward/overlong_penalty"] = float(length_penalties(cfg, response_lens(batch)).mean())
    kept = ~dropped
    if cfg.algorithm.overlong_filtering:
        cut = torch.tensor([rollout.finish_reason == "length" for group in groups for rollout in group.rollouts])
        counts["samples/overlong_left_out"] = float((kept & cut).sum())
        kept &= ~cut
    mask = batch.loss_mask & kept[segments]
    columns: dict[str, torch.Tensor] = {}
    if cfg.algorithm.rollout_correction.measures_ratio:
        assert old_logprobs is not None
        found = _corrected(cfg, batch, mask, old_logprobs)
        mask = found.kept
        counts |= found.metrics
        if found.weights is not None:
            columns["rollout_weights"] = found.weights
    kept = sequence_sums(mask, segments, batch.num_sequences) > 0
    return Shaped(kept, mask, columns, counts)


def _corrected(cfg: RunConfig, batch: TrainBatch, mask: torch.Tensor, old_logprobs: torch.Tensor) -> Correction:
    correction = cfg.algorithm.rollout_correction
    return correct_rollouts(
        old_logprobs,
        batch.columns["rollout_logprobs"],
        mask,
        batch.segments,
        batch.num_sequences,
        weights=correction.rollout_is,
        weight_high=correction.rollout_is_threshold,
        weight_low=correction.rollout_is_threshold_lower,
        reject=correction.rollout_rs,
        reject_high=correction.rollout_rs_threshold,
        reject_low=correction.rejects_below,
        veto_below=correction.rollout_token_veto_threshold,
    )


def loss_old_logprobs(
    cfg: RunConfig, batch: TrainBatch, old_logprobs: torch.Tensor | None, num_updates: int
) -> dict[str, torch.Tensor]:
    """The old_logprobs column of the loss; none where a step's one update starts from the policy that sampled."""
    if cfg.algorithm.rollout_correction.bypass_mode:
        return {"old_logprobs": batch.columns["rollout_logprobs"]}
    if num_updates == 1:
        return {}
    assert old_logprobs is not None
    return {"old_logprobs": old_logprobs}
