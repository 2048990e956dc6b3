"""One algorithm, one file: each lists the flow of one step."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config.algorithms import AlgorithmName
from megatron_rl.flow import Flow
from megatron_rl.trainers.dpo import dpo
from megatron_rl.trainers.grpo import grpo
from megatron_rl.trainers.parts import Parts
from megatron_rl.trainers.ppo import ppo
from megatron_rl.trainers.reward_model import reward_model
from megatron_rl.trainers.sft import sft

TRAINERS: dict[AlgorithmName, Callable[[Parts], Flow]] = {
    "dpo": dpo,
    "grpo": grpo,
    "ppo": ppo,
    "reward_model": reward_model,
    "sft": sft,
}
"""algorithm.name -> the flow of its step"""
