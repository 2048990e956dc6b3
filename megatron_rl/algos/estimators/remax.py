"""ReMax: a response against the most likely response to the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.estimators.base import Credit, TokenEstimator
from megatron_rl.settings import Share, section

if TYPE_CHECKING:
    from megatron_rl.algos.estimators.tokens import CreditTokens


@section
class Remax(TokenEstimator):
    """A_t = G_t - R(greedy response to the same prompt), G_t = r_t + gamma G_{t+1} the reward to go.

    Li et al. 2024 (ReMax).
    """

    needs_greedy: ClassVar[bool] = True
    gamma: Share = 1.0
    """Discount of later rewards."""

    def __call__(self, tokens: CreditTokens) -> Credit:
        """[T] float32 advantages."""
        above = tokens.rewards_to_go(self.gamma).double() - tokens.greedy_baseline()
        return Credit((above * tokens.loss_mask).float())
