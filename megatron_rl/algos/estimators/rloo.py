"""RLOO: a response against the mean of the *other* responses to the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class Rloo(SequenceEstimator):
    """A = R - mean of the other samples of the group = n / (n - 1) (R - mean of group).

    Ahmadian et al. 2024 (RLOO), after Kool et al. 2019. A group of one has no others and gets 0.
    """

    compares_samples: ClassVar[bool] = True

    def __call__(self, sequences: ScoredSequences) -> Tensor:
        """[S] float64 advantages."""
        count = sequences.group_sizes()
        return count / (count - 1).clamp(min=1) * (sequences.returns - sequences.group_moments()[0])
