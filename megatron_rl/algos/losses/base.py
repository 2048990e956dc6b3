"""What a policy loss is: a frozen record of its own settings; calling it gives a loss for each trained token.

r = exp(logprobs - old_logprobs) is the new policy's probability of a sampled token over that of the policy that
sampled it, A the token's advantage, sg() a value without gradient. Sums and denominators are the caller's.

Modules of losses import no torch, since the config reads their settings: use the methods of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveFloat

from megatron_rl.settings import Variant, section

if TYPE_CHECKING:
    from torch import Tensor

TokenMetrics = dict[str, "Tensor"]
"""name -> [n] values, averaged over the trained tokens"""

# exp(20) is 5e8: a ratio beyond it says nothing more, and in float32 exp(89) is infinite, its gradient NaN.
_LOG_RATIO_CAP = 20.0


@dataclass(frozen=True)
class LossTokens:
    """The trained tokens of a micro-batch on a rank. Tensors [n]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence_means: Callable[[Tensor], Tensor] | None = None
    """[n] -> [n]: mean over all trained tokens of the token's sequence, wherever they are; without gradient"""

    def log_ratio(self) -> Tensor:
        """log r of each token."""
        return self.logprobs - self.old_logprobs

    def ratio(self) -> Tensor:
        """r of each token."""
        return self.log_ratio().clamp(-_LOG_RATIO_CAP, _LOG_RATIO_CAP).exp()

    def mean_log_ratio(self) -> Tensor:
        """The mean of log r over each token's sequence, without gradient."""
        if self.sequence_means is None:
            raise ValueError("this loss takes means over sequences, and its tokens have no segment_ids")
        return self.sequence_means(self.log_ratio().detach())


@dataclass(frozen=True)
class PolicyLoss(Variant, ABC):
    """Base of all policy losses."""

    @abstractmethod
    def __call__(self, tokens: LossTokens) -> tuple[Tensor, TokenMetrics]:
        """[n] losses, and values for metrics. `ratio` is one of them, for the metrics of the step."""


@section
class ClipRange:
    """Settings of losses that clip the ratio to [1 - low, 1 + high]."""

    clip_ratio: PositiveFloat = 0.2
    """Clipping range of the policy ratio, used on each side that has no range of its own."""
    clip_ratio_low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Range below 1; clip_ratio when not given. 1.0 does not clip: a ratio is never negative."""
    clip_ratio_high: PositiveFloat | None = None
    """Range above 1 (DAPO's clip-higher); clip_ratio when not given."""

    @property
    def clip_low(self) -> float:
        """Range below 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Range above 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    def clip(self, ratio: Tensor) -> Tensor:
        """The ratio, cut to the range."""
        return ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, TokenMetrics]:
        """min(r A, clip(r) A) of each token. clip_frac counts the tokens whose clipped term is the smaller one."""
        free, clipped = ratio * advantages, self.clip(ratio) * advantages
        return free.minimum(clipped), {"clip_frac": (clipped < free).float(), "ratio": ratio}
