"""The algorithms: pure functions on tensors. A new one is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.algos.advantages import AdvantageInputs, grpo_advantages
from megatron_rl.algos.losses import PolicyLoss, ppo_clip_loss

ADVANTAGES: dict[str, Callable[[AdvantageInputs], torch.Tensor]] = {
    "grpo": grpo_advantages,
}
"""algorithm.adv_estimator -> function from AdvantageInputs to token advantages [T]"""

LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip_loss,
}
"""actor.loss_mode -> function from token tensors [n] to token losses [n]"""
