"""Token losses. Each returns [n] losses and [n] values for metrics; sums and denominators are the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.algos.kl import KL_ESTIMATORS

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PolicyInputs:
    """Tensors [n] over the trained tokens, and the scalars of the clipped losses."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    clip_low: float
    clip_high: float


PolicyLoss = Callable[[PolicyInputs], tuple[torch.Tensor, Values]]


def ppo_clip_loss(inputs: PolicyInputs) -> tuple[torch.Tensor, Values]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - old_logprobs).

    Schulman et al. 2017 (PPO); with high > low, Yu et al. 2025 (DAPO's clip-higher). clip_frac counts the tokens whose
    clipped term is the smaller one: those that get no gradient.
    """
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    free = ratio * inputs.advantages
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * inputs.advantages
    return -torch.minimum(free, clipped), {"clip_frac": (clipped < free).float(), "ratio": ratio}


def nll_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, Values]:
    """Supervised fine-tuning: -log p of each response token."""
    return -logprobs, {"nll": -logprobs}


def policy_objective(
    policy_loss: PolicyLoss,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coeff: float,
    kl_loss_coef: float,
    kl_loss_type: str,
) -> Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, Values]]:
    """The whole token loss of a policy update: policy loss - entropy_coeff * H + kl_loss_coef * KL.

    The columns hold advantages, and old_logprobs unless the step is on-policy: then the policy's own log-probabilities
    stand for them (detached), and the ratio is exactly 1. ref_logprobs are there when a reference model is.
    """

    def objective(
        logprobs: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Values]:
        old_logprobs = columns["old_logprobs"] if "old_logprobs" in columns else logprobs.detach()
        inputs = PolicyInputs(logprobs, old_logprobs, columns["advantages"], clip_low, clip_high)
        losses, values = policy_loss(inputs)
        values |= {"entropy": entropy, "approx_kl": old_logprobs - logprobs}
        if entropy_coeff:
            losses = losses - entropy_coeff * entropy
        if "ref_logprobs" in columns:
            kl = KL_ESTIMATORS[kl_loss_type](logprobs, columns["ref_logprobs"])
            values["kl_ref"] = kl
            if kl_loss_coef:
                losses = losses + kl_loss_coef * kl
        return losses, values

    return objective
