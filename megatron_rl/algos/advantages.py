"""Advantage estimators without a critic. Letters: S sequences, G groups (prompts), T tokens, sequences end to end.

Each is a function from AdvantageInputs to token advantages [T] float32, 0 where loss_mask is False. R is the sum of a
sequence's token rewards: its score, less the KL penalty where that is in the reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import discounted_sums, whiten


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use; each takes what it needs."""

    token_rewards: torch.Tensor
    """[T] float32: the score on each sequence's last trained token, less the KL penalty on every token"""
    loss_mask: torch.Tensor
    """[T] bool"""
    segment_ids: torch.Tensor
    """[T] int64: sequence of each token, ascending"""
    group_ids: torch.Tensor
    """[S] int64: group (prompt) of each sequence"""
    norm_by_std: bool
    """grpo divides by the group's standard deviation"""
    gamma: float = 1.0
    """discount of reinforce_plus_plus and remax"""
    baselines: torch.Tensor | None = None
    """[G] score of each prompt's greedy response, for remax"""
    kept: torch.Tensor | None = None
    """[S] bool: sequences whose group is in the update; all where not given. Statistics of the batch are over these."""

    def counted(self) -> torch.Tensor:
        """[T] bool: trained tokens of kept sequences."""
        return self.loss_mask if self.kept is None else self.loss_mask & self.kept[self.segment_ids]

    def returns(self) -> torch.Tensor:
        """[S] float64: R of each sequence."""
        return sequence_sums(self.token_rewards, self.segment_ids, len(self.group_ids))

    def spread(self, advantages: torch.Tensor) -> torch.Tensor:
        """[S] -> [T] float32, the same on each trained token of a sequence."""
        return (advantages[self.segment_ids] * self.loss_mask).float()


def sequence_sums(values: torch.Tensor, segment_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[T] values -> [S] sums in float64, so that the order of tokens does not show."""
    sums = torch.zeros(num_sequences, dtype=torch.float64)
    return sums.index_add_(0, segment_ids, values.double())


def _num_groups(group_ids: torch.Tensor) -> int:
    return int(group_ids.max()) + 1 if group_ids.numel() else 0


def _group_sums(values: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """[S] values -> [S] float64, the sum over each sequence's group."""
    sums = torch.zeros(_num_groups(group_ids), dtype=torch.float64)
    return sums.index_add_(0, group_ids, values.double())[group_ids]


def group_moments(returns: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased standard deviation of each sequence's group, both [S] float64.

    The deviation of a group of one, and of a group whose returns are all equal, is exactly 0.
    """
    count = _group_sums(torch.ones_like(returns), group_ids)
    mean = _group_sums(returns, group_ids) / count
    variance = _group_sums((returns - mean).square(), group_ids) / (count - 1).clamp(min=1)
    flat = flat_groups(returns, group_ids)
    return torch.where(flat, returns, mean), torch.where(flat, 0.0, variance.sqrt())


def flat_groups(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """[S] bool: whether all returns of the sequence's group are equal. Such a group carries no advantage."""
    num_groups = _num_groups(group_ids)
    low = torch.full((num_groups,), float("inf"), dtype=returns.dtype)
    high = torch.full((num_groups,), float("-inf"), dtype=returns.dtype)
    low = low.scatter_reduce(0, group_ids, returns, "amin")
    high = high.scatter_reduce(0, group_ids, returns, "amax")
    return (low == high)[group_ids]


def grpo_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A = (R - mean of group) / (std of group + 1e-6), the same on each token of a response. [T] float32.

    Shao et al. 2024 (GRPO); without the division (norm_by_std False), Dr. GRPO. Groups whose returns are equal get 0.
    """
    returns = inputs.returns()
    mean, std = group_moments(returns, inputs.group_ids)
    advantages = returns - mean
    if inputs.norm_by_std:
        advantages = advantages / (std + 1e-6)
    return inputs.spread(advantages)


def dr_grpo_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A = R - mean of group. [T] float32.

    Liu et al. 2025 (Dr. GRPO). The paper's loss also divides by a constant length:
    loss_agg_mode seq-mean-token-sum-norm.
    """
    returns = inputs.returns()
    return inputs.spread(returns - group_moments(returns, inputs.group_ids)[0])


def rloo_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A = R - mean of the *other* samples of the group = n / (n - 1) (R - mean of group). [T] float32.

    Ahmadian et al. 2024 (RLOO), after Kool et al. 2019. A group of one has no others and gets 0.
    """
    returns = inputs.returns()
    count = _group_sums(torch.ones_like(returns), inputs.group_ids)
    mean, _ = group_moments(returns, inputs.group_ids)
    return inputs.spread(count / (count - 1).clamp(min=1) * (returns - mean))


def opo_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A = R - b, b = sum(l R) / sum(l) over the group, l the trained tokens of each response. [T] float32.

    Hao et al. 2025 (OPO): the baseline of least variance where a response's gradient norm grows with its length.
    """
    returns = inputs.returns()
    lengths = sequence_sums(inputs.loss_mask, inputs.segment_ids, len(returns))
    weighted = _group_sums(lengths * returns, inputs.group_ids)
    baseline = weighted / _group_sums(lengths, inputs.group_ids).clamp(min=1)
    # The quotient rounds; a group without differences has exactly no advantage.
    baseline = torch.where(flat_groups(returns, inputs.group_ids), returns, baseline)
    return inputs.spread(returns - baseline)


def reinforce_plus_plus_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A_t = G_t whitened over all tokens of the batch, G_t = r_t + gamma G_{t+1} the reward to go. [T] float32.
    Groups that leave the update (drop_flat_groups) take no part and get 0.

    Hu 2025 (REINFORCE++), whose KL penalty is in the reward (algorithm.use_kl_in_reward).
    """
    to_go = discounted_sums(inputs.token_rewards, inputs.loss_mask, inputs.segment_ids, gamma=inputs.gamma)
    return whiten(to_go, inputs.counted())


def reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A = R - mean of group, then whitened over all tokens of the batch. [T] float32. Groups that leave the update
    (drop_flat_groups, filter_groups) take no part: their zeros would make the deviation, and so the scale, another.

    Hu 2025 (REINFORCE++-baseline): the group's mean as baseline, the batch's deviation as scale.
    """
    return whiten(dr_grpo_advantages(inputs), inputs.counted())


def remax_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A_t = G_t - R(greedy response to the same prompt), G_t the reward to go. [T] float32.

    Li et al. 2024 (ReMax).
    """
    assert inputs.baselines is not None, "remax needs the scores of greedy responses"
    to_go = discounted_sums(inputs.token_rewards, inputs.loss_mask, inputs.segment_ids, gamma=inputs.gamma)
    baseline = inputs.baselines.double()[inputs.group_ids][inputs.segment_ids]
    return ((to_go.double() - baseline) * inputs.loss_mask).float()
