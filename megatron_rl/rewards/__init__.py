"""Rewards: functions from one response to a number, run in processes that can be killed (rewards/pool.py).

Standard library only at import, so that reward processes start fast.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.rewards.math import math_equal
from megatron_rl.rewards.text import exact_match, numeric

REWARDS: dict[str, Callable[..., object]] = {
    "exact_match": exact_match,
    "math": math_equal,
    "numeric": numeric,
}
"""Name in reward.function -> reward, in verl's form (data_source, solution_str, ground_truth, extra_info)."""
