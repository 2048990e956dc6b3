"""What a loss of preferences is: a frozen record of its own settings; calling it gives a loss for each row of data.

Letters: R rows of data, S answers. Answers of a row are next to each other: of a pair the chosen one comes first.
logp is log pi(y|x), the sum of an answer's token log-probabilities, and h = logp - logp_ref its log ratio to the
reference model. sigma() is the logistic function. Losses are not averaged here: the caller divides by R.

Modules of losses import no torch outside of calls, since the config reads their settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat

from megatron_rl.settings import Variant, section

if TYPE_CHECKING:
    from torch import Tensor

RowKind = Literal["pairs", "labelled", "scored"]
"""What a row of data holds: a better and a worse answer, one answer with a label, or one answer with a number."""


@dataclass(frozen=True)
class Answers:
    """What is known of the S answers of R rows. Tensors are float64, so that the order of tokens does not show."""

    values: Tensor
    """[S] the sum of log-probabilities of an answer's tokens; of a reward model, its score"""
    ref_logprobs: Tensor
    """[S] the same sum under the reference model; 0 if the loss has none"""
    lens: Tensor
    """[S] tokens of each answer"""
    targets: Tensor
    """[R] the margin of a pair, the label of a labelled row (1 or -1), the number of a scored one"""
    kl: float = 0.0
    """KTO's z0: the batch's estimate of KL(policy, reference), at least 0"""

    @property
    def log_ratios(self) -> Tensor:
        """[S] h"""
        return self.values - self.ref_logprobs

    @property
    def mean_logprobs(self) -> Tensor:
        """[S] logp / tokens"""
        return self.values / self.lens.clamp(min=1)

    def select(self, answers: slice) -> Answers:
        """Some answers of each row."""
        return replace(
            self, values=self.values[answers], ref_logprobs=self.ref_logprobs[answers], lens=self.lens[answers]
        )


@dataclass(frozen=True)
class JudgedLoss(Variant, ABC):
    """Base of all losses of rows that were judged: of preferences, and of reward models."""

    rows: ClassVar[RowKind] = "pairs"
    needs_reference: ClassVar[bool] = False
    """It compares the policy with a frozen model."""
    mismatched: ClassVar[bool] = False
    """Each row comes with another row's answer to its own prompt, by which a KL is estimated."""
    reads_margins: ClassVar[bool] = False
    """A pair's margin counts."""
    value_is: ClassVar[str] = "logprob"
    """What the model's value of an answer is called in metrics."""
    adds_nll: ClassVar[bool] = False
    """The caller adds the negative log-likelihood of the chosen texts, prompts included, averaged over their tokens."""

    @abstractmethod
    def __call__(self, answers: Answers) -> Tensor:
        """[R] losses."""

    @abstractmethod
    def rewards(self, answers: Answers) -> Tensor:
        """[S] the reward that the model gives each answer, without gradient: what metrics compare."""

    @property
    def sequences_per_row(self) -> int:
        """Sequences that a row becomes."""
        return 2 if self.rows == "pairs" or self.mismatched else 1


@section
class PreferenceLoss(JudgedLoss):
    """A loss of the policy's log-probabilities."""

    beta: PositiveFloat = 0.1
    """Scale of the implicit reward: a small one lets the policy move further from where it started."""


@section
class ReferenceLoss(PreferenceLoss):
    """A preference loss with rewards beta h."""

    needs_reference: ClassVar[bool] = True

    def rewards(self, answers: Answers) -> Tensor:
        """[S] beta h"""
        return self.beta * answers.log_ratios


def differences(values: Tensor) -> Tensor:
    """[S] values of pairs -> [R] that of the chosen answer less that of the rejected one."""
    return values[0::2] - values[1::2]


def log_sigmoid(values: Tensor) -> Tensor:
    """log sigma(x), of the same shape."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)
