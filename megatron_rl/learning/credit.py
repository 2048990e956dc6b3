"""From scores to the advantage of every token: calls the estimator of either kind on the whole batch."""

from __future__ import annotations

import torch

from megatron_rl.algos.estimators.base import Credit, Estimator, ScoredSequences, SequenceEstimator, TokenEstimator
from megatron_rl.algos.estimators.tokens import CreditTokens
from megatron_rl.algos.groups import sequence_sums, spread
from megatron_rl.types import TrainBatch


def credit(
    estimator: Estimator,
    batch: TrainBatch,
    group_ids: torch.Tensor,
    token_rewards: torch.Tensor,
    *,
    kept: torch.Tensor | None = None,
    baselines: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
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
