"""Estimators of KL(policy || reference) from one sample (Schulman 2020, "Approximating KL divergence").

p is the policy's probability of the sampled token, q the reference's. Value and gradient are two things: an estimator
whose mean is the KL may, as a loss, have a gradient whose mean is not the KL's. Each docstring says both, for samples
drawn from p itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LOG_RATIO_CAP = 20.0
_K3_CAP = 10.0

KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q: unbiased, may be negative. As a loss its gradient has mean 0: use it in the reward, or k1+."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2: biased value; as a loss its gradient is the KL's."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """q/p - 1 - log(q/p): unbiased value, never negative; as a loss biased: its gradient is that of
    KL(reference || policy).

    Cut as verl cuts it: the log-ratio to [-20, 20], then the value to at most 10. Value and gradient are as above where
    log(q/p) is between -11.0 and 2.6; beyond, the value is 10 and the gradient 0. Without the cuts a reference that is
    20 nats above the policy on one token gives a loss of 4.9e8, and one 89 nats above gives infinity.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-_LOG_RATIO_CAP, _LOG_RATIO_CAP)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=_K3_CAP)


def k_abs(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """|log p - log q|: biased value and gradient."""
    return (logprobs - ref_logprobs).abs()


def with_kl_gradient(estimator: KlEstimator) -> KlEstimator:
    """The estimator's value with the gradient (log p - log q) grad log p, whose mean is the KL's gradient."""

    def value_and_gradient(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        surrogate = k2(logprobs, ref_logprobs)
        # In brackets: the difference is exactly 0, however large the surrogate is.
        return estimator(logprobs, ref_logprobs).detach() + (surrogate - surrogate.detach())

    return value_and_gradient


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": k_abs,
}
"""algorithm.kl_penalty -> estimator ([n], [n]) -> [n]"""

KL_LOSSES: dict[str, KlEstimator] = {
    **KL_ESTIMATORS,
    **{f"{name}+": with_kl_gradient(estimator) for name, estimator in KL_ESTIMATORS.items()},
}
"""actor.kl_loss_type -> estimator; a name with + has the KL's own gradient"""


def kl_loss(
    name: str, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """[n] KL terms of a loss. name: a key of KL_LOSSES.

    ratio: new / old policy of each sampled token, differentiable, where the samples are the old policy's: each term
    is weighted by it (DeepSeek-AI 2025, V3.2). Values are then unbiased for k1 and k3, gradients for k1, k3 and all
    names with +. Without ratio, gradients after a step's first update are off by it.
    """
    terms = KL_LOSSES[name](logprobs, ref_logprobs)
    if ratio is None:
        return terms
    # The + forms have the whole gradient already; the others need the ratio's part of it.
    return terms * (ratio.detach() if name.endswith("+") else ratio)
