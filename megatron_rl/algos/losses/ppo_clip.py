"""PPO's clipped surrogate, with DAPO's clip-higher and the dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatron_rl.algos.losses.base import ClipRange, LossTokens, PolicyLoss, TokenMetrics
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class PpoClip(ClipRange, PolicyLoss):
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c A.

    Schulman et al. 2017 (PPO); with high > low, Yu et al. 2025 (DAPO's clip-higher); with c = clip_ratio_c, Ye et al.
    2020 (dual clip). clip_frac counts the tokens whose clipped term is the smaller one, dual_clip_frac those that c
    stops: both get no gradient.
    """

    clip_ratio_c: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Dual clip: if the advantage is negative the ratio counts as at most this; null turns it off."""

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, TokenMetrics]:
        """[n] losses and values for metrics."""
        advantages = tokens.advantages
        surrogate, metrics = self.surrogate(tokens.ratio(), advantages)
        if self.clip_ratio_c is not None:
            floor = self.clip_ratio_c * advantages
            stopped = (advantages < 0) & (floor > surrogate)
            surrogate = floor.where(stopped, surrogate)
            metrics["dual_clip_frac"] = stopped.float()
        return -surrogate, metrics
