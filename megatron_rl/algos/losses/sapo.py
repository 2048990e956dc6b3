"""SAPO: a soft gate in place of clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from megatron_rl.algos.losses.base import LossTokens, PolicyLoss, TokenMetrics
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class Sapo(PolicyLoss):
    """-f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau = tau_pos where A > 0 and tau_neg elsewhere.

    Gao et al. 2025 (SAPO); f has slope 1 at r = 1.
    """

    tau_pos: PositiveFloat = 1.0
    """Temperature of the soft gate where the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    """Temperature of the soft gate elsewhere: higher closes it faster."""

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, TokenMetrics]:
        """[n] losses and values for metrics."""
        ratio, advantages = tokens.ratio(), tokens.advantages
        tau = ratio.new_full(ratio.shape, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        return -4.0 / tau * (tau * (ratio - 1.0)).sigmoid() * advantages, {"ratio": ratio}
