"""Advantage estimators. Letters: S sequences, T tokens of all sequences end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use; each takes what it needs."""

    token_rewards: torch.Tensor
    """[T] float32: the score on each sequence's last trained token, less the KL penalty on every token"""
    loss_mask: torch.Tensor
    """[T] bool"""
    segment_ids: torch.Tensor
    """[T] int64: sequence of each token"""
    group_ids: torch.Tensor
    """[S] int64: group (prompt) of each sequence"""
    norm_by_std: bool
    """divide by the group's standard deviation"""


def sequence_sums(values: torch.Tensor, segment_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[T] values -> [S] sums in float64, so that the order of tokens does not show."""
    sums = torch.zeros(num_sequences, dtype=torch.float64)
    return sums.index_add_(0, segment_ids, values.double())


def group_moments(returns: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased standard deviation of each sequence's group, both [S] float64.

    The deviation of a group of one, and of a group whose returns are all equal, is exactly 0.
    """
    num_groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    zeros = torch.zeros(num_groups, dtype=torch.float64)
    count = zeros.index_add(0, group_ids, torch.ones_like(returns))
    mean = (zeros.index_add(0, group_ids, returns) / count)[group_ids]
    centred = returns - mean
    variance = zeros.index_add(0, group_ids, centred.square()) / (count - 1).clamp(min=1)
    flat = flat_groups(returns, group_ids)
    return torch.where(flat, returns, mean), torch.where(flat, 0.0, variance.sqrt()[group_ids])


def flat_groups(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """[S] bool: whether all returns of the sequence's group are equal. Such a group carries no advantage."""
    num_groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    low = torch.full((num_groups,), float("inf"), dtype=returns.dtype)
    high = torch.full((num_groups,), float("-inf"), dtype=returns.dtype)
    low = low.scatter_reduce(0, group_ids, returns, "amin")
    high = high.scatter_reduce(0, group_ids, returns, "amax")
    return (low == high)[group_ids]


def grpo_advantages(inputs: AdvantageInputs) -> torch.Tensor:
    """A = (R - mean of group) / (std of group + 1e-6), the same on each token of a response. [T] float32.

    Shao et al. 2024 (GRPO); without the division, Liu et al. 2025 (Dr. GRPO). Groups whose returns are equal get 0.
    """
    num_sequences = inputs.group_ids.shape[0]
    returns = sequence_sums(inputs.token_rewards, inputs.segment_ids, num_sequences)
    mean, std = group_moments(returns, inputs.group_ids)
    advantages = returns - mean
    if inputs.norm_by_std:
        advantages = advantages / (std + 1e-6)
    return (advantages[inputs.segment_ids] * inputs.loss_mask).float()
