"""Names of functions of the layers above, which import torch. A test holds both equal."""

from __future__ import annotations

ADV_ESTIMATORS: tuple[str, ...] = ("grpo",)
"""Keys of megatron_rl.algos.ADVANTAGES."""
LOSS_MODES: tuple[str, ...] = ("ppo_clip",)
"""Keys of megatron_rl.algos.LOSSES."""
REWARD_NAMES: tuple[str, ...] = ("exact_match", "math", "numeric")
"""Keys of megatron_rl.rewards.REWARDS."""
VLLM_HEAD_DIMS: tuple[int, ...] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM has kernels for."""
