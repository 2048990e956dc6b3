"""GSPO: PPO's clipped surrogate with one ratio for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algos.losses.base import ClipRange, LossTokens, PolicyLoss, TokenMetrics
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor

_LOG_SEQUENCE_RATIO_CAP = 10.0


@section
class Gspo(ClipRange, PolicyLoss):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the sequence of log r).

    Zheng et al. 2025 (GSPO), in its token form: s = sg(s) p / sg(p), equal to the sequence form in value and
    gradient. The paper averages within sequences (loss_agg_mode seq-mean-token-mean) and clips at 3e-4 and 4e-4.
    log s is cut at 10 from above, as verl cuts it; a token beyond has no gradient.
    """

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, TokenMetrics]:
        """[n] losses and values for metrics."""
        logprobs = tokens.logprobs
        log_ratio = tokens.mean_log_ratio() + (logprobs - logprobs.detach())
        surrogate, metrics = self.surrogate(log_ratio.clamp(max=_LOG_SEQUENCE_RATIO_CAP).exp(), tokens.advantages)
        return -surrogate, metrics
