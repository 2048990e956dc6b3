"""CISPO: the weight of the policy gradient is clipped, and no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algos.losses.base import ClipRange, LossTokens, PolicyLoss, TokenMetrics
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class Cispo(ClipRange, PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log p.

    MiniMax 2025 (CISPO, of MiniMax-M1). The paper leaves the lower side open (clip_ratio_low 1.0). clip_frac counts the
    tokens whose weight was clipped.
    """

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, TokenMetrics]:
        """[n] losses and values for metrics."""
        ratio = tokens.ratio().detach()
        weight = self.clip(ratio)
        metrics = {"clip_frac": (weight != ratio).float(), "ratio": ratio}
        return -weight * tokens.advantages * tokens.logprobs, metrics
