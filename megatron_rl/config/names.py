"""Names of functions of the layers above, which import torch. A test holds both equal."""

from __future__ import annotations

GROUP_ESTIMATORS: tuple[str, ...] = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators that compare the samples of a prompt, and so need two or more."""
ADV_ESTIMATORS: tuple[str, ...] = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")
"""Keys of megatron_rl.algos.estimators.ESTIMATORS."""
VALUE_ESTIMATORS: tuple[str, ...] = ("gae",)
"""Estimators that need a critic's values (trainers/ppo.py)."""
LOSS_MODES: tuple[str, ...] = ("ppo_clip", "gspo", "cispo", "sapo", "reinforce")
"""Keys of megatron_rl.algos.losses.LOSSES."""
REWARD_NAMES: tuple[str, ...] = (
    *("code", "exact_match", "format", "math", "numeric", "reasoning_gym", "regex", "data_source", "default"),
)
"""Keys of megatron_rl.rewards.REWARDS."""
