"""The algorithms: pure functions on tensors. A new one is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.algos import advantages, losses
from megatron_rl.algos.advantages import AdvantageInputs
from megatron_rl.algos.losses import PolicyLoss

ADVANTAGES: dict[str, Callable[[AdvantageInputs], torch.Tensor]] = {
    "grpo": advantages.grpo_advantages,
    "dr_grpo": advantages.dr_grpo_advantages,
    "rloo": advantages.rloo_advantages,
    "opo": advantages.opo_advantages,
    "reinforce_plus_plus": advantages.reinforce_plus_plus_advantages,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline_advantages,
    "remax": advantages.remax_advantages,
}
"""algorithm.adv_estimator -> function from AdvantageInputs to token advantages [T]; gae, which needs a critic,
is in algos/gae.py"""

LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": losses.ppo_clip_loss,
    "gspo": losses.gspo_loss,
    "cispo": losses.cispo_loss,
    "sapo": losses.sapo_loss,
    "reinforce": losses.reinforce_loss,
}
"""actor.loss_mode -> function from token tensors [n] to token losses [n]"""
