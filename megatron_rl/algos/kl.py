"""Estimators of KL(policy || reference) from one sample (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable

import torch


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q: unbiased, may be negative. As a loss its gradient has mean 0: use it in the reward."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2: biased value; as an on-policy loss its gradient is the KL's."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """q/p - 1 - log(q/p): unbiased value, never negative; as a loss its gradient is that of KL(reference || policy)."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def k_abs(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """|log p - log q|: biased value and gradient."""
    return (logprobs - ref_logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": k_abs,
}
"""actor.kl_loss_type and algorithm.kl_penalty -> estimator ([n], [n]) -> [n]"""
