"""Rewards: functions from one response to a number, run in processes that can be killed (rewards/pool.py)."""

from __future__ import annotations

REWARDS: dict[str, str] = {
    "exact_match": "megatron_rl.rewards.text:exact_match",
    "math": "megatron_rl.rewards.math:math_equal",
    "numeric": "megatron_rl.rewards.text:numeric",
}
"""Name in reward.function -> module:function. A reward process imports only the module that it needs."""
