"""What an estimator is, in two kinds: per sequence (on the controller) and per token (on the ranks).

A frozen record of its own settings; calling it gives advantages. The class variables say what a run must bring for it.
Modules of estimators import no torch, since the config reads their settings: use the methods of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algos.groups import group_moments, group_sums
from megatron_rl.settings import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.algos.estimators.tokens import CreditTokens


@dataclass(frozen=True)
class Estimator(Variant):
    """Common to both kinds: what the estimator needs of the run."""

    compares_samples: ClassVar[bool] = False
    """Compares the samples of a prompt with each other: rollout.n is 2 or more."""
    needs_greedy: ClassVar[bool] = False
    """Needs the score of the most likely response to each prompt, which is generated for it."""
    needs_values: ClassVar[bool] = False
    """Needs a critic's values (algorithm.name ppo)."""


class SequenceEstimator(Estimator, ABC):
    """One advantage for each sequence, the same on each of its trained tokens. Runs on the controller, in O(S)."""

    @abstractmethod
    def __call__(self, sequences: ScoredSequences) -> Tensor:
        """[S] float64 advantages."""


class TokenEstimator(Estimator, ABC):
    """One advantage for each token. Runs on every data-parallel rank, over the sequences of the rank."""

    @abstractmethod
    def __call__(self, tokens: CreditTokens) -> Credit:
        """Advantages of the rank's tokens, and the critic's targets where there is a critic."""


@dataclass(frozen=True)
class Credit:
    """Both [T] float32, 0 where loss_mask is False."""

    advantages: Tensor
    returns: Tensor | None = None
    """what the critic's values are trained to be, for estimators that need values"""


@dataclass(frozen=True)
class ScoredSequences:
    """All sequences of a step, by what is known of each."""

    returns: Tensor
    """[S] float64: R, the sum of a sequence's token rewards: its score, less the KL penalty if that is in the reward"""
    group_ids: Tensor
    """[S] int64: group (prompt) of each sequence"""
    lens: Tensor
    """[S]: trained tokens of each sequence"""
    kept: Tensor | None = None
    """[S] bool: sequences whose group is in the update; all if not given. Statistics of the batch are over these."""
    moments: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = group_moments
    """What computes group_moments"""

    def group_sums(self, values: Tensor) -> Tensor:
        """[S] -> [S] float64, the sum over each sequence's group."""
        return group_sums(values, self.group_ids)

    def group_sizes(self) -> Tensor:
        """[S] float64: sequences of each sequence's group."""
        return self.group_sums(self.returns.new_ones(len(self.returns)))

    def group_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and unbiased standard deviation of the returns of each sequence's group, both [S] float64."""
        return self.moments(self.returns, self.group_ids)

    def whiten(self, values: Tensor) -> Tensor:
        """[S] -> [S]: (x - mean) / (std + 1e-8), mean and std over all trained tokens of kept sequences.

        Each sequence counts as often as it has trained tokens. Sequences that are not kept get 0.
        """
        lens = self.lens.double() if self.kept is None else self.lens.double() * self.kept
        # As float32 numbers, which is what tokens get: sums of equal ones are then exact.
        values, count = values.float().double(), lens.sum()
        centred = values - (lens * values).sum() / count.clamp(min=1)
        std = ((lens * centred.square()).sum() / (count - 1).clamp(min=1)).sqrt()
        return (centred / (std + 1e-8)).masked_fill(lens == 0, 0.0)
