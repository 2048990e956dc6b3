"""What a rank computes of the tokens of its sequences between passes: KL, credit, loss weights, comparisons.

Functions of a RankBatch, of what the controller knows of each sequence, and of add_up, which adds small sums up over
the data-parallel ranks. Every rank of the last pipeline stage calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_rl.algos.correction import correct_rollouts, mismatch_metrics
from megatron_rl.algos.estimators.base import TokenEstimator
from megatron_rl.algos.estimators.tokens import CreditTokens
from megatron_rl.algos.gae import Sums
from megatron_rl.algos.groups import spread
from megatron_rl.algos.kl import KL_ESTIMATORS
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.scan import KlPenalty
from megatron_rl.algos.values import value_metrics
from megatron_rl.config.run import RunConfig
from megatron_rl.ops.advantages import KERNELS
from megatron_rl.types import Column
from megatron_rl.workers.rank_batch import RankBatch


@dataclass(frozen=True)
class MiniBatches:
    """Which mini-batch each sequence is in."""

    of_sequence: torch.Tensor
    """[S] int64, from 0"""
    count: int
    """of the step, over all ranks"""

    def select(self, sequences: Sequence[int]) -> MiniBatches:
        """Of these sequences."""
        return MiniBatches(self.of_sequence[list(sequences)], self.count)


@dataclass(frozen=True)
class SequenceFacts:
    """What the controller knows of the sequences of a step; each rank gets those of its RankBatch, in its order."""

    scores: torch.Tensor
    """[S] float64: the rewards' values, less penalties for length"""
    counted: torch.Tensor
    """[S] bool: sequences whose group is in the update; statistics of the batch are over these"""
    kept: torch.Tensor
    """[S] bool: sequences that the actor may learn from"""
    minis: MiniBatches
    """of the actor"""
    critic_minis: MiniBatches | None = None
    """of a critic with an optimizer of its own"""
    advantages: torch.Tensor | None = None
    """[S] float64, of an estimator per sequence"""
    greedy_scores: torch.Tensor | None = None
    """[S] float64: scores of the greedy responses to the same prompts, for an estimator that needs them"""

    def select(self, sequences: Sequence[int]) -> SequenceFacts:
        """Of these sequences."""
        chosen = list(sequences)
        return SequenceFacts(
            scores=self.scores[chosen],
            counted=self.counted[chosen],
            kept=self.kept[chosen],
            minis=self.minis.select(chosen),
            critic_minis=None if self.critic_minis is None else self.critic_minis.select(chosen),
            advantages=None if self.advantages is None else self.advantages[chosen],
            greedy_scores=None if self.greedy_scores is None else self.greedy_scores[chosen],
        )


@dataclass(frozen=True)
class CreditReport:
    """What came of it. metrics are of all ranks, and equal on all of them."""

    kept: torch.Tensor
    """[S] bool: sequences with a token in the actor's loss"""
    metrics: dict[str, float] = field(default_factory=dict)
    """correction/...: what rollout correction did"""
    value_metrics: dict[str, float] = field(default_factory=dict)
    """critic/...: how well the values foresaw the returns"""


def kl_sums(batch: RankBatch, penalty: str) -> torch.Tensor:
    """[S] float64: the KL of policy and reference summed over each sequence's trained tokens; column kl has the terms.

    penalty: a key of KL_ESTIMATORS.
    """
    terms = KL_ESTIMATORS[penalty](batch.column("old_logprobs"), batch.column("ref_logprobs"))
    batch.put("kl", terms)
    return batch.sums(terms)


def token_scores(batch: RankBatch, scores: torch.Tensor) -> torch.Tensor:
    """[T] float32: each score [S] on the last token of its sequence."""
    of_tokens = torch.zeros(len(batch.tokens))
    of_tokens[torch.cumsum(torch.tensor(batch.seq_lens, dtype=torch.int64), 0) - 1] = scores.float()
    return of_tokens


def credit(batch: RankBatch, facts: SequenceFacts, cfg: RunConfig, kl_coef: float, add_up: Sums) -> CreditReport:
    """Write what the losses need: advantages, loss_weights, rollout_weights if asked for; with a critic, returns and
    the weights of its loss. kl_coef: weight of the KL in the reward, 0 without one.
    """
    report = _credit(batch, facts, cfg, kl_coef, add_up)
    trained = batch.loss_mask & facts.kept[batch.segments]
    if cfg.algorithm.rollout_correction.measures_ratio:
        trained, metrics = _correct(batch, trained, cfg, add_up)
        report = replace(report, metrics=metrics)
    write_loss_weights(batch, "loss_weights", cfg.actor.loss_agg_mode, facts.minis, cfg, add_up, trained)
    if facts.critic_minis is not None:
        # The actor leaves out what it may not learn from; the critic's targets hold for every sampled token.
        mode = cfg.critic.loss_agg_mode
        write_loss_weights(batch, "critic_weights", mode, facts.critic_minis, cfg, add_up)
    return replace(report, kept=batch.sums(trained) > 0)


def _credit(batch: RankBatch, facts: SequenceFacts, cfg: RunConfig, kl_coef: float, add_up: Sums) -> CreditReport:
    """Advantages, and returns if there are values."""
    report = CreditReport(facts.kept)
    if facts.advantages is not None:
        batch.put("advantages", spread(facts.advantages, batch.loss_mask, batch.segments))
        return report
    estimator = cfg.algorithm.adv_estimator
    assert isinstance(estimator, TokenEstimator), estimator
    values = batch.column("values") if estimator.needs_values else None
    tokens = CreditTokens(
        token_scores(batch, facts.scores),
        batch.loss_mask,
        batch.segments,
        batch.num_sequences,
        facts.counted,
        facts.greedy_scores,
        values,
        add_up,
        KlPenalty(kl_coef, batch.column("kl")) if kl_coef else None,
        KERNELS,
    )
    found = estimator(tokens)
    batch.put("advantages", found.advantages)
    if values is None or found.returns is None:
        return report
    batch.put("returns", found.returns)
    return replace(report, value_metrics=value_metrics(values, found.returns, batch.loss_mask, add_up))


def _correct(
    batch: RankBatch, trained: torch.Tensor, cfg: RunConfig, add_up: Sums
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mask [T] without what rollout correction rejects, and what it did; column rollout_weights if it gives any."""
    settings = cfg.algorithm.rollout_correction
    correction = correct_rollouts(
        batch.column("old_logprobs"),
        batch.column("rollout_logprobs"),
        trained,
        batch.segments,
        batch.num_sequences,
        weights=settings.rollout_is,
        weight_high=settings.rollout_is_threshold,
        weight_low=settings.rollout_is_threshold_lower,
        reject=settings.rollout_rs,
        reject_high=settings.rollout_rs_threshold,
        reject_low=settings.rejects_below,
        veto_below=settings.rollout_token_veto_threshold,
        add_up=add_up,
    )
    if correction.weights is not None:
        batch.put("rollout_weights", correction.weights)
    return correction.kept, correction.metrics


def write_loss_weights(
    batch: RankBatch,
    into: Column,
    mode: str,
    minis: MiniBatches,
    cfg: RunConfig,
    add_up: Sums,
    trained: torch.Tensor | None = None,
) -> None:
    """Weights of the tokens of `trained` [T], the loss mask by default; each mini-batch has denominators of its own."""
    weights = loss_weights(
        mode,
        batch.loss_mask if trained is None else trained,
        batch.segments,
        batch.num_sequences,
        cfg.data.max_response_length,
        mini_of=minis.of_sequence,
        num_minis=minis.count,
        add_up=add_up,
    )
    batch.put(into, weights)


def compare(batch: RankBatch, trainer: Column, add_up: Sums) -> dict[str, float]:
    """mismatch/... between the engine's log-probabilities and the trainer's, over all that was sampled (contract N8);
    kl/ref if the reference's are there. trainer: the column with those of the policy that sampled.
    """
    seen = batch.loss_mask
    logprobs = batch.column(trainer)[seen]
    metrics = mismatch_metrics(logprobs, batch.column("rollout_logprobs")[seen], add_up)
    if "ref_logprobs" in batch:
        gap = (logprobs - batch.column("ref_logprobs")[seen]).double()
        total, count = add_up(torch.stack([gap.sum(), gap.new_tensor(len(gap))])).tolist()
        metrics["kl/ref"] = total / max(count, 1.0)
    return metrics
