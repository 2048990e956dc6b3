"""From losses of whole answers to losses of tokens, which is what an optimizer step adds up."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import Sums, alone
from megatron_rl.algos.losses.base import TokenMetrics
from megatron_rl.algos.preference.base import Answers, JudgedLoss

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class AnswerLoss:
    """A loss of answers as a loss of their tokens: a TokenLoss without an entropy.

    A row's loss is spread evenly over its trained tokens, and each token has the row's slope: sum(losses) is the sum of
    the rows' losses, and so is its gradient. It holds where the tokens of an answer lie on several ranks (context
    parallelism), for each of them sees all sums and lets the gradient through its own tokens alone.

    Columns beside those of sequence_means_of, all [n]: ref_logprobs, if the loss has a reference, of which the sum over
    an answer counts; targets, the same number at all tokens of a row; if a loss adds the nll, answers (1 at tokens of
    answers, 0 at those of prompts), and nll_weights, by which -logp is added.
    """

    loss: JudgedLoss
    sequences_per_row: int
    """Of the rows in a micro-batch: 1 where mismatched answers are left out."""
    kl: float = 0.0
    add_up: Sums = alone
    """Adds sums up over the ranks that share the sequences."""

    def __call__(self, values: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, TokenMetrics]:
        """values: [n] log-probabilities, or scores. Returns [n] losses and no metrics: these are of answers."""
        segment_ids, trained = columns["segment_ids"], columns["sequence_lens"]
        counted = columns.get("answers", torch.ones_like(values))
        zeros = torch.zeros_like(values)
        ref, targets = columns.get("ref_logprobs", zeros), columns.get("targets", zeros)
        facts = torch.stack([values.detach() * counted, ref * counted, counted, targets], 1).double()
        sums = torch.zeros(len(trained), 4, dtype=torch.float64, device=values.device)
        sums = self.add_up(sums.index_add_(0, segment_ids, facts))
        tokens_of_row = trained.view(-1, self.sequences_per_row).sum(1)
        of_row = sums[:, 3].view(-1, self.sequences_per_row).sum(1) / tokens_of_row.clamp(min=1)
        losses, slopes = self._losses(Answers(sums[:, 0], sums[:, 1], sums[:, 2], of_row, self.kl))
        share = (losses / tokens_of_row.clamp(min=1))[segment_ids // self.sequences_per_row]
        moving = values - values.detach()
        spread = share.to(values.dtype) + slopes[segment_ids].to(values.dtype) * counted * moving
        if "nll_weights" in columns:
            spread = spread - columns["nll_weights"] * values
        return spread, {}

    def _losses(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] losses, and [S] their derivatives by the values."""
        leaf = answers.values.detach().clone().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(Answers(leaf, answers.ref_logprobs, answers.lens, answers.targets, answers.kl))
            (slopes,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), slopes

    def of_tokens(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """As a TokenLoss."""
        return self(logprobs, columns)


def kl_estimate(values: torch.Tensor, ref_logprobs: torch.Tensor) -> float:
    """KTO's z0 from the sums [R] of mismatched answers: the mean log ratio of the whole batch, at least 0."""
    return max(float((values - ref_logprobs).mean()), 0.0) if len(values) else 0.0
