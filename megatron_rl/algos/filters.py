"""What happens to scores and groups before advantages are made (DAPO, Yu et al. 2025)."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import torch


def overlong_penalty(
    response_lens: torch.Tensor, max_response_length: int, buffer_len: int, penalty_factor: float
) -> torch.Tensor:
    """-factor * clip((l - (L - b)) / b, 0, 1) for responses of l tokens, [S] float64: to be added to the score.

    L is the longest response allowed and b the buffer. Yu et al. 2025 (DAPO's soft overlong punishment).

    Example: L 100, b 20, factor 1: 0 up to 80 tokens, -0.5 at 90, -1 at 100.
    """
    over = response_lens.double() - (max_response_length - buffer_len)
    return -penalty_factor * (over / buffer_len).clamp(0.0, 1.0)


def differing_groups(values: torch.Tensor, group_size: int) -> list[bool]:
    """Of [G * group_size] values, group after group: whether the values of each group differ (DAPO's dynamic
    sampling keeps these).
    """
    table = values.reshape(-1, group_size)
    return (table.amax(1) > table.amin(1)).tolist()
