"""GRPO: a response against the others to the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class Grpo(SequenceEstimator):
    """A = (R - mean of group) / (std of group + 1e-6). Groups whose returns are equal get 0.

    Shao et al. 2024 (GRPO); without the division, Dr. GRPO.
    """

    compares_samples: ClassVar[bool] = True
    norm_by_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO); false is Dr.GRPO's form."""

    def __call__(self, sequences: ScoredSequences) -> Tensor:
        """[S] float64 advantages."""
        mean, std = sequences.group_moments()
        advantages = sequences.returns - mean
        return advantages / (std + 1e-6) if self.norm_by_std else advantages
