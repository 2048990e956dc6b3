"""The critic's loss. Returns [n] losses and [n] values for metrics, as policy losses do."""

from __future__ import annotations

import torch

from megatron_rl.algos.gae import Sums, alone
from megatron_rl.algos.losses.base import TokenMetrics


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip_range: float | None
) -> tuple[torch.Tensor, TokenMetrics]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 of each token, c = clip_range; None does not clip.

    Schulman et al. 2017 (PPO), in the form of its reference code. values, old_values, returns: [n] over trained
    tokens; old_values are those that the returns were made with. vf_clip_frac counts the tokens whose clipped term is
    the larger one: those that get no gradient.
    """
    free = (values - returns).square()
    metrics = {"vf_error": (values - returns).abs(), "value": values}
    if clip_range is None:
        return 0.5 * free, metrics
    near = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(free, clipped), metrics | {"vf_clip_frac": (clipped > free).float()}


def value_metrics(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, add_up: Sums = alone
) -> dict[str, float]:
    """critic/value_mean, critic/return_mean and critic/explained_variance over the masked tokens of all ranks.

    values: [T], those that the returns [T] were made with. The explained variance is 1 - Var(R - V) / Var(R): 1 is a
    perfect critic, 0 a constant one; NaN if the returns do not vary.
    """
    seen, wanted = values[mask].double(), returns[mask].double()
    error = (returns - values)[mask].double()
    sums = add_up(torch.stack([seen.new_tensor(len(seen)), seen.sum(), wanted.sum(), error.sum()]))
    count = sums[0].clamp(min=1)
    value_mean, return_mean, error_mean = sums[1:] / count
    squares = torch.stack([(error - error_mean).square().sum(), (wanted - return_mean).square().sum()])
    of_error, of_returns = add_up(squares)
    return {
        "critic/value_mean": float(value_mean),
        "critic/return_mean": float(return_mean),
        "critic/explained_variance": 1.0 - float(of_error / of_returns) if float(of_returns) else float("nan"),
    }
