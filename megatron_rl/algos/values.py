"""The critic's loss. Returns [n] losses and [n] values for metrics, as policy losses do."""

from __future__ import annotations

import torch

Values = dict[str, torch.Tensor]


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip_range: float | None
) -> tuple[torch.Tensor, Values]:
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


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the masked tokens of [T] columns: 1 is a perfect critic, 0 a constant one.

    NaN where the returns do not vary.
    """
    wanted, error = returns[mask].double(), (returns - values)[mask].double()
    spread = float(wanted.var(correction=0)) if len(wanted) else 0.0
    return 1.0 - float(error.var(correction=0)) / spread if spread else float("nan")
