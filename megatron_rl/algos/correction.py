"""How far the engine's probabilities are from the trainer's: measured on every step (contract N8)."""

from __future__ import annotations

import torch


def mismatch_metrics(train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> dict[str, float]:
    """Same weights, same tokens, two programs: [n] log-probabilities of each -> mean, p99, max of |difference|, and KL.

    kl is E[log p_rollout - log p_train] over sampled tokens: an estimate of KL(rollout || train), the k1 form.
    """
    if not train_logprobs.numel():
        return {}
    gap = (rollout_logprobs - train_logprobs).double()
    return {
        "mismatch/abs_mean": float(gap.abs().mean()),
        "mismatch/abs_p99": float(gap.abs().kthvalue(max(1, int(gap.numel() * 0.99))).values),
        "mismatch/abs_max": float(gap.abs().max()),
        "mismatch/kl": float(gap.mean()),
    }
