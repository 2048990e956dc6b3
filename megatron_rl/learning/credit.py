"""From scores to what the update trains on: facts of sequences are made here, what is per token on the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator
from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.learning.batch import Batch
from megatron_rl.learning.kl_control import KlControl
from megatron_rl.learning.passes import LossColumns, Made, Models
from megatron_rl.ops.advantages import KERNELS
from megatron_rl.types import Column
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.token_work import CreditReport, MiniBatches, SequenceFacts


@dataclass(frozen=True)
class TrainInputs:
    """What the actor's update takes."""

    train_plan: BatchPlan
    """the plan, less the sequences that are left out"""
    loss_columns: LossColumns
    """the columns of its loss"""
    kept: Tensor
    """[S] bool: sequences with a token in it"""
    counts: dict[str, float]
    """what was left out, and why"""


@dataclass(frozen=True)
class Returns:
    """What is known of each sequence before credit."""

    scores: Tensor
    """[S] float64, with penalties for length"""
    returns: Tensor
    """[S] float64: the same, less the KL penalty if that is in the reward"""
    kl_coef: float
    """weight of that KL; 0 if it is not"""


def returns_of(
    models: Models,
    kl_control: KlControl,
    batch: Batch,
    scores: Tensor,
    old_logprobs: Made | None,
    ref_logprobs: Made | None,
) -> Returns:
    """The return of each sequence; terms of the KL stay on the ranks. Brings there what a node of one's own made."""
    algorithm = models.cfg.algorithm
    made: dict[Column, Made | None] = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    for column, value in made.items():
        if value is not None:
            models.put(batch, column, value)
    # Rewards of tokens are float32 numbers.
    returns = scores.float().double()
    if not algorithm.use_kl_in_reward:
        return Returns(scores, returns, 0.0)
    coef = kl_control.coef
    kl = batch.join(models.on_each(BatchWorker.kl_sums, algorithm.kl_penalty))
    kl_control.observe(kl / batch.response_lens.clamp(min=1))
    return Returns(scores, returns - coef * kl, coef)


def assign_credit(
    models: Models,
    batch: Batch,
    returns: Returns,
    penalties: Tensor,
    dropped: Tensor | None = None,
    baselines: Tensor | None = None,
) -> tuple[CreditReport, dict[str, float]]:
    """Have the ranks write advantages and loss weights; what stays in the update ([S] kept), and counts of the rest.

    penalties: [S] of the responses' length, in the scores. dropped: [S] bool, sequences of groups that leave the
    update. baselines: [G] scores of greedy responses.
    """
    cfg, algorithm = models.cfg, models.cfg.algorithm
    counted = torch.ones(batch.num_sequences, dtype=torch.bool) if dropped is None else ~dropped
    kept = counted & ~batch.was_cut if algorithm.overlong_filtering else counted
    estimator, advantages = algorithm.adv_estimator, None
    if isinstance(estimator, SequenceEstimator):
        moments = KERNELS.group_moments
        sequences = ScoredSequences(returns.returns, batch.group_ids, batch.response_lens, counted, moments)
        advantages = estimator(sequences)
    own_critic = cfg.needs.critic and not cfg.critic.share_backbone
    facts = SequenceFacts(
        scores=returns.scores,
        counted=counted,
        kept=kept,
        minis=_mini_batches(batch, cfg.actor_training),
        critic_minis=_mini_batches(batch, cfg.critic_training) if own_critic else None,
        advantages=advantages,
        greedy_scores=None if baselines is None else baselines[batch.group_ids],
    )
    of_ranks = [facts.select(numbers) for numbers in batch.numbers]
    reports = models.group.each_dp(BatchWorker.credit, of_ranks, returns.kl_coef)
    counts = {"groups/dropped": float((~counted).sum()) / cfg.rollout.n}
    if algorithm.overlong_buffer.enable:
        counts["reward/overlong_penalty"] = float(penalties.mean())
    if algorithm.overlong_filtering:
        counts["samples/overlong_left_out"] = float((counted & batch.was_cut).sum())
    whole = CreditReport(batch.join([report.kept for report in reports]), reports[0].metrics, reports[0].value_metrics)
    return whole, counts | whole.metrics


def _mini_batches(batch: Batch, training: TrainingConfig) -> MiniBatches:
    mini_of = batch.group_ids // training.mini_batch_size
    return MiniBatches(mini_of, int(mini_of.max()) + 1)


def loss_columns(cfg: RunConfig) -> dict[str, Column]:
    """The columns of the actor's loss; old_logprobs is none of them if a step's one update starts from the policy that
    sampled: its own log-probabilities stand for them.
    """
    columns: dict[str, Column] = {"advantages": "advantages", "loss_weights": "loss_weights"}
    correction = cfg.algorithm.rollout_correction
    if correction.bypass_mode:
        columns["old_logprobs"] = "rollout_logprobs"
    elif cfg.updates_per_step > 1:
        columns["old_logprobs"] = "old_logprobs"
    if cfg.needs_reference:
        columns["ref_logprobs"] = "ref_logprobs"
    if correction.rollout_is:
        columns["rollout_weights"] = "rollout_weights"
    if cfg.needs.critic and cfg.critic.share_backbone:
        columns |= VALUE_COLUMNS
    return columns


VALUE_COLUMNS: dict[str, Column] = {"old_values": "values", "returns": "returns"}
"""The columns of a critic's loss beside its weights"""
