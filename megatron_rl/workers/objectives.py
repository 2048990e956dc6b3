"""Objectives of an optimizer step as picklable records. A new one is a class here.

The record itself travels to the ranks, where `on(model)` makes it a function of hidden states (mcore/objectives.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_rl.algos.losses.base import TokenMetrics
from megatron_rl.algos.preference.base import JudgedLoss
from megatron_rl.algos.preference.tokens import AnswerLoss
from megatron_rl.algos.token_losses import KlTerm, TokenLoss, UpdateLoss, nll_loss
from megatron_rl.algos.values import value_loss
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.parallel.collectives import adder

if TYPE_CHECKING:
    # Megatron's modules are imported on a rank, after its shim and its environment are in place.
    from megatron_rl.mcore import objectives as mcore
    from megatron_rl.mcore.build import Model
    from megatron_rl.mcore.packing import MicroBatch


class Objective(Protocol):
    """A frozen dataclass with everything that the objective needs beside the batch's columns."""

    def on(self, model: Model) -> mcore.HiddenLoss:
        """The objective for this model. Called on a rank whose process groups exist."""
        ...


@dataclass(frozen=True)
class PolicyObjective:
    """The actor's policy loss with its entropy bonus and KL, as `actor` configures it, at a sampling temperature."""

    actor: ActorConfig
    temperature: float

    def on(self, model: Model) -> mcore.HiddenLoss:
        """See Objective."""
        from megatron_rl.mcore.objectives import token_objective

        return token_objective(model, actor_loss(self.actor), self.temperature)


@dataclass(frozen=True)
class NllObjective:
    """Negative log-likelihood of the trained tokens: supervised fine-tuning."""

    def on(self, model: Model) -> mcore.HiddenLoss:
        """See Objective."""
        from megatron_rl.mcore.objectives import token_objective

        return token_objective(model, nll_loss, 1.0)


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss of whole answers by their log-probabilities. sequences_per_row: of the micro-batches. kl: KTO's z0, of the
    whole batch. Hands back log-probabilities, 0 at tokens of prompts.
    """

    loss: JudgedLoss
    sequences_per_row: int
    kl: float = 0.0

    def on(self, model: Model) -> mcore.HiddenLoss:
        """See Objective."""
        from megatron_rl.mcore.objectives import token_objective
        from megatron_rl.parallel.groups import cp_group

        loss = AnswerLoss(self.loss, self.sequences_per_row, self.kl, adder(cp_group()))
        objective = token_objective(model, loss.of_tokens, 1.0)

        def of_answers(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, TokenMetrics, torch.Tensor]:
            losses, metrics, logprobs = objective(micro, hidden)
            return losses, metrics, logprobs * micro.columns["answers"] if "answers" in micro.columns else logprobs

        return of_answers


@dataclass(frozen=True)
class ScoreObjective:
    """A reward model's loss, by the scores of whole answers; hands back the scores."""

    loss: JudgedLoss
    sequences_per_row: int

    def on(self, model: Model) -> mcore.HiddenLoss:
        """See Objective."""
        from megatron_rl.mcore.objectives import value_objective
        from megatron_rl.parallel.groups import cp_group

        return value_objective(model, AnswerLoss(self.loss, self.sequences_per_row, add_up=adder(cp_group())))


@dataclass(frozen=True)
class ValueObjective:
    """The critic's squared error of the returns. clip_range: how far from the old value the new one counts; 0
    turns clipping off.
    """

    clip_range: float

    def on(self, model: Model) -> mcore.HiddenLoss:
        """See Objective."""
        from megatron_rl.mcore.objectives import value_objective

        def loss(values: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, TokenMetrics]:
            old, returns = columns["old_values"], columns["returns"]
            losses, metrics = value_loss(values, old, returns, clip_range=self.clip_range or None)
            return losses, metrics | {"vf_loss": losses}

        return value_objective(model, loss)


@dataclass(frozen=True)
class PolicyValueObjective:
    """policy + vf_coef * value, both heads on one forward pass; hands back the log-probabilities."""

    policy: PolicyObjective
    value: ValueObjective
    vf_coef: float

    def on(self, model: Model) -> mcore.HiddenLoss:
        """See Objective."""
        from megatron_rl.mcore.objectives import weighted_sum

        return weighted_sum(self.policy.on(model), self.value.on(model), self.vf_coef)


def actor_loss(actor: ActorConfig) -> TokenLoss:
    """The token loss of a policy update, as configured. Called on a rank whose groups exist."""
    from megatron_rl.parallel.groups import cp_group

    kl = KlTerm(actor.kl_loss_coef if actor.use_kl_loss else 0.0, actor.kl_loss_type, actor.kl_loss_importance)
    # Context parallelism spreads the tokens of a sequence over ranks.
    return UpdateLoss(actor.loss, actor.entropy_coeff, kl, add_up=adder(cp_group()))
