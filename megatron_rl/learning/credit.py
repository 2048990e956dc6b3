"""From scores to what the update trains on: rewards of tokens, weights of tokens in the loss, what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algos.correction import Correction, correct_rollouts
from megatron_rl.algos.estimators.base import Credit, Estimator, ScoredSequences, SequenceEstimator, TokenEstimator
from megatron_rl.algos.estimators.tokens import CreditTokens
from megatron_rl.algos.groups import sequence_sums, spread
from megatron_rl.algos.kl import KL_ESTIMATORS
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.learning.kl_control import KlControl
from megatron_rl.learning.passes import bare
from megatron_rl.types import RolloutGroup, TrainBatch


@dataclass(frozen=True)
class TrainInputs:
    """What the actor's update takes."""

    train_batch: TrainBatch
    """with every column of its loss"""
    train_plan: BatchPlan
    """the plan, less the sequences that are left out"""
    kept: Tensor
    """[S] bool: the others"""
    counts: dict[str, float]
    """what was left out, and why"""


def token_rewards(
    cfg: RunConfig,
    kl_control: KlControl,
    batch: TrainBatch,
    scores: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> Tensor:
    """[T] float32: the scores [S], each on the last token of its sequence, less the KL penalty on trained tokens."""
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float32)
    ends = torch.cumsum(torch.tensor(batch.seq_lens), 0) - 1
    rewards[ends] = scores.float()
    if cfg.algorithm.use_kl_in_reward:
        assert old_logprobs is not None and ref_logprobs is not None
        kl = KL_ESTIMATORS[cfg.algorithm.kl_penalty](old_logprobs, ref_logprobs)
        rewards -= kl_control.coef * kl * batch.loss_mask
        kl_control.observe(kl, batch)
    return rewards


def mini_batch_weights(
    cfg: RunConfig, batch: TrainBatch, group_ids: Tensor, trained: Tensor, training: TrainingConfig | None = None
) -> Tensor:
    """[T] float32 loss weights; each mini-batch has denominators of its own, over its tokens trained [T].

    training: of the model that is updated; the actor's if not given.
    """
    training = training or cfg.actor_training
    mini_of = group_ids // training.mini_batch_size
    return loss_weights(
        training.loss_agg_mode,
        trained,
        batch.segments,
        batch.num_sequences,
        cfg.data.max_response_length,
        mini_of=mini_of,
        num_minis=int(mini_of.max()) + 1,
    )


def credit(
    estimator: Estimator,
    batch: TrainBatch,
    group_ids: Tensor,
    token_rewards: Tensor,
    *,
    kept: Tensor | None = None,
    baselines: Tensor | None = None,
    values: Tensor | None = None,
) -> Credit:
    """Advantages of all tokens of a step, and returns where the estimator has values. Both [T] float32.

    group_ids: [S] int64. token_rewards: [T] float32. kept: [S] bool, sequences whose group is in the update.
    baselines: [G] scores of greedy responses. values: [T] float32, a critic's.
    """
    mask, segments, count = batch.loss_mask, batch.segments, batch.num_sequences
    if isinstance(estimator, SequenceEstimator):
        returns, lens = (sequence_sums(column, segments, count) for column in (token_rewards, mask))
        advantages = estimator(ScoredSequences(returns, group_ids, lens, kept))
        return Credit(spread(advantages, mask, segments))
    assert isinstance(estimator, TokenEstimator), estimator
    greedy_scores = None if baselines is None else baselines[group_ids]
    return estimator(CreditTokens(token_rewards, mask, segments, count, kept, greedy_scores, values))


def train_inputs(
    cfg: RunConfig,
    batch: TrainBatch,
    group_ids: Tensor,
    plan: BatchPlan,
    selection: Selection,
    advantages: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> TrainInputs:
    """Every column of the actor's loss, the sequences that stay in it, and what was left out."""
    columns = {
        "advantages": advantages,
        "loss_weights": mini_batch_weights(cfg, batch, group_ids, selection.mask),
        **loss_old_logprobs(cfg, batch, old_logprobs),
        **selection.columns,
    }
    if ref_logprobs is not None:
        columns["ref_logprobs"] = ref_logprobs
    return TrainInputs(bare(batch).with_(**columns), plan.keep(selection.kept), selection.kept, selection.counts)


def response_lens(batch: TrainBatch) -> Tensor:
    """[S] float64: sampled tokens of each sequence."""
    return sequence_sums(batch.loss_mask, batch.segments, batch.num_sequences)


@dataclass(frozen=True)
class Selection:
    """What of a batch the update trains on."""

    kept: Tensor
    """[S] bool: sequences with any token that does"""
    mask: Tensor
    """[T] bool: those tokens"""
    columns: dict[str, Tensor]
    """rollout_weights, where rollout correction gives weights"""
    counts: dict[str, float]
    """what was left out, and why"""


def select_tokens(
    cfg: RunConfig,
    batch: TrainBatch,
    groups: Sequence[RolloutGroup],
    dropped: Tensor,
    penalties: Tensor,
    old_logprobs: Tensor | None,
) -> Selection:
    """Sequences `dropped` [S] (flat groups), truncated ones if asked, and what rollout correction rejects.

    penalties: [S] of their length, in the scores; their mean is counted.
    """
    segments = batch.segments
    counts = {"groups/dropped": float(dropped.sum()) / len(groups[0].rollouts)}
    if cfg.algorithm.overlong_buffer.enable:
        counts["reward/overlong_penalty"] = float(penalties.mean())
    kept = ~dropped
    if cfg.algorithm.overlong_filtering:
        cut = torch.tensor([rollout.finish_reason == "length" for group in groups for rollout in group.rollouts])
        counts["samples/overlong_left_out"] = float((kept & cut).sum())
        kept &= ~cut
    mask = batch.loss_mask & kept[segments]
    columns: dict[str, Tensor] = {}
    if cfg.algorithm.rollout_correction.measures_ratio:
        assert old_logprobs is not None
        found = _corrected(cfg, batch, mask, old_logprobs)
        mask = found.kept
        counts |= found.metrics
        if found.weights is not None:
            columns["rollout_weights"] = found.weights
    kept = sequence_sums(mask, segments, batch.num_sequences) > 0
    return Selection(kept, mask, columns, counts)


def _corrected(cfg: RunConfig, batch: TrainBatch, mask: Tensor, old_logprobs: Tensor) -> Correction:
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


def loss_old_logprobs(cfg: RunConfig, batch: TrainBatch, old_logprobs: Tensor | None) -> dict[str, Tensor]:
    """The old_logprobs column of the loss; none where a step's one update starts from the policy that sampled."""
    if cfg.algorithm.rollout_correction.bypass_mode:
        return {"old_logprobs": batch.columns["rollout_logprobs"]}
    if cfg.updates_per_step == 1:
        return {}
    assert old_logprobs is not None
    return {"old_logprobs": old_logprobs}
