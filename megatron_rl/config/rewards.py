"""The rewards that have a name, and where each is."""

from __future__ import annotations

REWARDS: dict[str, str] = {
    "code": "megatron_rl.rewards.code:runs_correctly",
    "exact_match": "megatron_rl.rewards.text:exact_match",
    "format": "megatron_rl.rewards.text:tagged",
    "math": "megatron_rl.rewards.math:math_equal",
    "numeric": "megatron_rl.rewards.text:numeric",
    "reasoning_gym": "megatron_rl.rewards.gym:task_score",
    "regex": "megatron_rl.rewards.text:regex",
    "data_source": "megatron_rl.rewards.verl.choose:by_data_source",
    "default": "megatron_rl.rewards.verl.choose:by_default",
}
"""Name in reward.function -> module:function. A reward process imports only the module that it needs."""
