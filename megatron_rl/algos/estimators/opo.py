"""OPO: the group's mean weighted by length as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator
from megatron_rl.algos.groups import flat_groups
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class Opo(SequenceEstimator):
    """A = R - b, b = sum(l R) / sum(l) over the group, l the trained tokens of each response.

    Hao et al. 2025 (OPO): the baseline of least variance if a response's gradient norm grows with its length.
    """

    compares_samples: ClassVar[bool] = True

    def __call__(self, sequences: ScoredSequences) -> Tensor:
        """[S] float64 advantages."""
        returns, lens = sequences.returns, sequences.lens.double()
        baseline = sequences.group_sums(lens * returns) / sequences.group_sums(lens).clamp(min=1)
        # The quotient rounds; a group without differences has exactly no advantage.
        return (returns - baseline).masked_fill(flat_groups(returns, sequences.group_ids), 0.0)
