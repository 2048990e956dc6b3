"""Dr. GRPO: GRPO without the division by the group's deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class DrGrpo(SequenceEstimator):
    """A = R - mean of group.

    Liu et al. 2025 (Dr. GRPO). The paper's loss is also divided by a constant length. Here that is
    loss_agg_mode seq-mean-token-sum-norm, a setting of the actor and not of the estimator.
    """

    compares_samples: ClassVar[bool] = True

    def __call__(self, sequences: ScoredSequences) -> Tensor:
        """[S] float64 advantages."""
        return sequences.returns - sequences.group_moments()[0]
