"""REINFORCE++: the reward to go, whitened over the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algos.estimators.base import Credit, TokenEstimator
from megatron_rl.settings import Share, section

if TYPE_CHECKING:
    from megatron_rl.algos.estimators.tokens import CreditTokens


@section
class ReinforcePlusPlus(TokenEstimator):
    """A_t = G_t whitened over all tokens of the batch, G_t = r_t + gamma G_{t+1} the reward to go.

    Hu 2025 (REINFORCE++), whose KL penalty is in the reward (algorithm.use_kl_in_reward). Groups that leave the update
    (drop_flat_groups) take no part and get 0.
    """

    gamma: Share = 1.0
    """Discount of later rewards."""

    def __call__(self, tokens: CreditTokens) -> Credit:
        """[T] float32 advantages."""
        found = tokens.scan_rewards(self.gamma)
        return Credit(tokens.whiten(found.advantages, found.moments))
