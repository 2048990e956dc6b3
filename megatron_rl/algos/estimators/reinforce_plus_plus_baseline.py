"""REINFORCE++-baseline: the group's mean as baseline, the batch's deviation as scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class ReinforcePlusPlusBaseline(SequenceEstimator):
    """A = R - mean of group, then whitened over all tokens of the batch.

    Hu 2025 (REINFORCE++-baseline). Groups that leave the update (drop_flat_groups, filter_groups) take no part: their
    zeros would change the deviation, and so the scale.
    """

    compares_samples: ClassVar[bool] = True

    def __call__(self, sequences: ScoredSequences) -> Tensor:
        """[S] float64 advantages."""
        return sequences.whiten(sequences.returns - sequences.group_moments()[0])
