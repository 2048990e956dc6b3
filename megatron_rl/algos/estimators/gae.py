"""GAE: temporal differences of a critic's values."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat

from megatron_rl.algos.estimators.base import Credit, TokenEstimator
from megatron_rl.settings import Share, section

if TYPE_CHECKING:
    from megatron_rl.algos.estimators.tokens import CreditTokens


@section
class Gae(TokenEstimator):
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (megatron_rl/algos/gae.py).

    Schulman et al. 2016 (GAE); Yue et al. 2025 (VAPO) for lam_critic and lam_length_alpha.
    """

    needs_values: ClassVar[bool] = True
    gamma: Share = 1.0
    """Discount of later rewards."""
    lam: Share = 1.0
    """GAE's lambda of the policy's advantages."""
    lam_critic: Share | None = None
    """GAE's lambda of the critic's returns (VAPO: 1.0); lam when not given."""
    lam_length_alpha: PositiveFloat | None = None
    """Length-adaptive lambda of the policy's advantages, 1 - 1 / (alpha * length) (VAPO: 0.05), in place of lam."""
    whiten_advantages: bool = True
    """Shift and scale the advantages to mean 0 and deviation 1 over all tokens of the step (PPO)."""

    def __call__(self, tokens: CreditTokens) -> Credit:
        """[T] float32 advantages, and the returns for the critic."""
        adaptive = self.lam_length_alpha
        lam = self.lam if adaptive is None else tokens.length_adaptive_lam(adaptive)
        found = tokens.gae(self.gamma, lam, self.lam if self.lam_critic is None else self.lam_critic)
        white = self.whiten_advantages
        return Credit(tokens.whiten(found.advantages, found.moments) if white else found.advantages, found.returns)
