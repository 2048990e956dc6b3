"""Sums over sequences and groups. Letters: S sequences, G groups (prompts), T tokens, sequences end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sequence_sums(values: Tensor, segment_ids: Tensor, num_sequences: int) -> Tensor:
    """[T] values -> [S] sums in float64, so that the order of tokens does not show."""
    values = values.double()
    return values.new_zeros(num_sequences).index_add_(0, segment_ids, values)


def spread(values: Tensor, loss_mask: Tensor, segment_ids: Tensor) -> Tensor:
    """[S] -> [T] float32: each sequence's value on its trained tokens, 0 elsewhere."""
    return (values[segment_ids] * loss_mask).float()


def _num_groups(group_ids: Tensor) -> int:
    return int(group_ids.max()) + 1 if group_ids.numel() else 0


def group_sums(values: Tensor, group_ids: Tensor) -> Tensor:
    """[S] values -> [S] float64, the sum over each sequence's group."""
    values = values.double()
    return values.new_zeros(_num_groups(group_ids)).index_add_(0, group_ids, values)[group_ids]


def group_moments(returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each sequence's group, both [S] float64.

    The deviation of a group of one, and of a group whose returns are all equal, is exactly 0.
    """
    count = group_sums(returns.new_ones(len(returns)), group_ids)
    mean = group_sums(returns, group_ids) / count
    variance = group_sums((returns - mean).square(), group_ids) / (count - 1).clamp(min=1)
    flat = flat_groups(returns, group_ids)
    return returns.where(flat, mean), variance.sqrt().masked_fill(flat, 0.0)


def flat_groups(returns: Tensor, group_ids: Tensor) -> Tensor:
    """[S] bool: whether all returns of the sequence's group are equal. Such a group carries no advantage."""
    num_groups = _num_groups(group_ids)
    low = returns.new_full((num_groups,), float("inf")).scatter_reduce(0, group_ids, returns, "amin")
    high = returns.new_full((num_groups,), float("-inf")).scatter_reduce(0, group_ids, returns, "amax")
    return (low == high)[group_ids]
