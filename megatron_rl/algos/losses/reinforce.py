"""REINFORCE: the policy gradient without a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algos.losses.base import LossTokens, PolicyLoss, TokenMetrics
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class Reinforce(PolicyLoss):
    """-A log p: no clipping; after a step's first update the samples are not the policy's own any more.

    Williams 1992 (REINFORCE).
    """

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, TokenMetrics]:
        """[n] losses and values for metrics."""
        return -tokens.advantages * tokens.logprobs, {"ratio": tokens.ratio().detach()}
