"""The losses of preferences; base.py says what the letters mean. delta = h_chosen - h_rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megatron_rl.algos.preference.base import (
    Answers,
    PreferenceLoss,
    ReferenceLoss,
    RowKind,
    differences,
    log_sigmoid,
)
from megatron_rl.settings import section

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_ODDS = 1e-12
"""Where an answer's mean log-probability is 0 its odds are infinite; they are cut to 1 / this."""


@section
class Dpo(ReferenceLoss):
    """-log sigma(beta delta) - nll_coef m_chosen, m = logp / tokens. Rafailov et al. 2023 (DPO), equation 7; the second
    term is of Pang et al. 2024 (iterative reasoning preference optimization, RPO), equation 1.
    """

    nll_coef: NonNegativeFloat = 0.0
    """Weight of the chosen answers' negative log-likelihood of a token: DPO alone may make both answers less likely,
    and others more."""

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        losses = -log_sigmoid(self.beta * differences(answers.log_ratios))
        return losses - self.nll_coef * answers.mean_logprobs[0::2] if self.nll_coef else losses


@section
class Cdpo(ReferenceLoss):
    """-(1 - eps) log sigma(beta delta) - eps log sigma(-beta delta). Mitchell 2023 (conservative DPO): a share eps of
    the labels is taken to be wrong.
    """

    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.1
    """eps, the share of labels that are taken to be wrong."""

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        margin, eps = self.beta * differences(answers.log_ratios), self.label_smoothing
        return -(1.0 - eps) * log_sigmoid(margin) - eps * log_sigmoid(-margin)


@section
class Ipo(ReferenceLoss):
    """(delta' - 1 / (2 beta))^2, delta' of h / tokens. Azar et al. 2023 (IPO), equation 17, beta being its tau.

    Averaged over tokens as TRL does after its authors, so that beta means the same for short and long answers.
    """

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        return (differences(self._per_token(answers)) - 1.0 / (2.0 * self.beta)).square()

    def rewards(self, answers: Answers) -> Tensor:
        """[S] beta h / tokens: what the loss compares"""
        return self.beta * self._per_token(answers)

    @staticmethod
    def _per_token(answers: Answers) -> Tensor:
        return answers.log_ratios / answers.lens.clamp(min=1)


@section
class Kto(ReferenceLoss):
    """weight (1 - sigma(beta (h - z0))) of a good answer, weight (1 - sigma(beta (z0 - h))) of a bad one.

    Ethayarajh et al. 2024 (KTO), equations 7 and 8. z0 is the mean of h over answers to other rows' prompts, over the
    whole batch; at least 0, and without gradient.
    """

    rows: ClassVar[RowKind] = "labelled"
    mismatched: ClassVar[bool] = True
    desirable_weight: PositiveFloat = 1.0
    """Weight of good answers."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad answers: choose the two so that both kinds weigh about alike in the data."""

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        good = answers.targets > 0
        signs = good.to(answers.values.dtype) * 2.0 - 1.0
        weights = signs.new_full(signs.shape, self.undesirable_weight).masked_fill(good, self.desirable_weight)
        return weights * (1.0 - (self.beta * signs * (answers.log_ratios - answers.kl)).sigmoid())


@section
class Simpo(PreferenceLoss):
    """-log sigma(beta (m_chosen - m_rejected) - gamma), m = logp / tokens. Meng et al. 2024 (SimPO), equation 6."""

    beta: PositiveFloat = 2.0
    """Scale of the reward, the mean log-probability of a token (2 to 10 in the paper)."""
    gamma: NonNegativeFloat = 1.0
    """Margin of the rewards that is aimed at (0.5 to 5 in the paper)."""

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""
        return -log_sigmoid(differences(self.rewards(answers)) - self.gamma)

    def rewards(self, answers: Answers) -> Tensor:
        """[S] beta m"""
        return self.beta * answers.mean_logprobs


@section
class Orpo(PreferenceLoss):
    """nll - beta log sigma(log odds_chosen - log odds_rejected), odds = P / (1 - P), P = exp(logp / tokens).

    Hong et al. 2024 (ORPO), equations 4 to 7, beta being its lambda. nll is of the chosen texts, prompts included, as
    the authors' code and TRL have it.
    """

    adds_nll: ClassVar[bool] = True

    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses without the nll."""
        means = answers.mean_logprobs
        log_odds = means - (-means.expm1()).clamp(min=_LEAST_ODDS).log()
        return -self.beta * log_sigmoid(differences(log_odds))

    def rewards(self, answers: Answers) -> Tensor:
        """[S] beta logp / tokens"""
        return self.beta * answers.mean_logprobs
