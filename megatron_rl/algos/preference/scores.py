"""Losses of reward models, whose value of an answer is one number, its score; base.py says what the letters mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat

from megatron_rl.algos.preference.base import Answers, JudgedLoss, RowKind, differences, log_sigmoid
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor


@section
class ScoreLoss(JudgedLoss):
    """A loss of scores."""

    value_is: ClassVar[str] = "score"

    def rewards(self, answers: Answers) -> Tensor:
        """[S] scores"""
        return answers.values


@section
class BradleyTerry(ScoreLoss):
    """-log sigma(score_chosen - score_rejected - margin) + center_coef (score_chosen + score_rejected)^2.

    Bradley and Terry 1952; Ouyang et al. 2022, equation 1, with the margins of Touvron et al. 2023 (Llama 2), equation
    2, and the centering of Eisenstein et al. 2023.
    """

    reads_margins: ClassVar[bool] = True
    center_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (0.01 is usual)."""

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        scores = answers.values
        losses = -log_sigmoid(differences(scores) - answers.targets)
        return losses + self.center_coef * (scores[0::2] + scores[1::2]).square() if self.center_coef else losses


@section
class Regression(ScoreLoss):
    """(score - target)^2, of single answers with a number."""

    rows: ClassVar[RowKind] = "scored"

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        return (answers.values - answers.targets).square()
