"""Sums over sequences and groups. Letters: S sequences, G groups (prompts), T tokens, sequences end to end."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
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


def _numbered(group_ids: Tensor) -> tuple[Tensor, int]:
    """The groups numbered from 0, and one more than the largest number. Ids that are small numbers stay."""
    count = group_ids.numel()
    if count == 0:
        return group_ids, 0
    low, high = int(group_ids.min()), int(group_ids.max())
    if low < 0 or high >= 4 * count + 1024:
        group_ids = group_ids.unique(return_inverse=True)[1]
        high = int(group_ids.max())
    return group_ids, high + 1


def group_sums(values: Tensor, group_ids: Tensor) -> Tensor:
    """[S] values -> [S] float64, the sum over each sequence's group. group_ids: [S] int64, any numbers in any order."""
    values, (groups, num_groups) = values.double(), _numbered(group_ids)
    return values.new_zeros(num_groups).index_add_(0, groups, values)[groups]


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
    groups, num_groups = _numbered(group_ids)
    low = returns.new_full((num_groups,), float("inf")).scatter_reduce(0, groups, returns, "amin")
    high = returns.new_full((num_groups,), float("-inf")).scatter_reduce(0, groups, returns, "amax")
    return (low == high)[groups]
