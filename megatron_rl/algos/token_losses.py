"""Whole token losses of an update: (logprobs [n], entropy [n], columns) -> (losses [n], metrics [n])."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import Sums, alone
from megatron_rl.algos.kl import kl_loss
from megatron_rl.algos.losses.base import LossTokens, PolicyLoss, TokenMetrics

TokenLoss = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, TokenMetrics]]
"""(logprobs [n], entropy [n], columns) -> (losses [n], metrics [n])"""


def nll_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, TokenMetrics]:
    """Supervised fine-tuning: -log p of each response token."""
    return -logprobs, {"nll": -logprobs}


def sequence_means_of(columns: Mapping[str, torch.Tensor], add_up: Sums) -> Callable[[torch.Tensor], torch.Tensor]:
    """[n] token values -> [n] means over the trained tokens of each token's sequence.

    columns: segment_ids [n] int64, the sequence of each token here; sequence_lens [S] int64, trained tokens of each
    sequence over all ranks that share it. add_up: adds [S] sums up over those ranks (context parallelism).
    """
    segment_ids, lens = columns["segment_ids"], columns["sequence_lens"]

    def means(values: torch.Tensor) -> torch.Tensor:
        # In float64 the order in which tokens are added, which the layout decides, does not show.
        sums = torch.zeros(len(lens), dtype=torch.float64, device=values.device)
        sums = add_up(sums.index_add_(0, segment_ids, values.detach().double()))
        return (sums / lens.clamp(min=1)).to(values.dtype)[segment_ids]

    return means


@dataclass(frozen=True)
class KlTerm:
    """coef * KL(policy, reference) in the loss. With coef 0 the KL is measured and not trained on."""

    coef: float = 0.0
    type: str = "k3"
    """a name of megatron_rl.algos.kl.KL_LOSSES"""
    importance: bool = False
    """weight it by new / old policy"""


@dataclass(frozen=True)
class UpdateLoss:
    """w * policy loss - entropy_coeff * H + KL term.

    The columns hold advantages, and old_logprobs unless the step is on-policy: then the policy's own log-probabilities
    stand for them (detached), and the ratio is exactly 1. ref_logprobs are there when a reference model is, and
    rollout_weights (w) when rollout correction gives weights.
    """

    loss: PolicyLoss
    entropy_coeff: float = 0.0
    kl: KlTerm = KlTerm()
    add_up: Sums = alone
    """see sequence_means_of"""

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """A TokenLoss."""
        old_logprobs = columns["old_logprobs"] if "old_logprobs" in columns else logprobs.detach()
        means = sequence_means_of(columns, self.add_up) if "segment_ids" in columns else None
        tokens = LossTokens(logprobs, old_logprobs, columns["advantages"], means)
        losses, metrics = self.loss(tokens)
        metrics |= {"entropy": entropy, "approx_kl": old_logprobs - logprobs}
        if "rollout_weights" in columns:
            losses = losses * columns["rollout_weights"]
        if self.entropy_coeff:
            losses = losses - self.entropy_coeff * entropy
        if "ref_logprobs" in columns:
            ratio = tokens.ratio() if self.kl.importance else None
            kl = kl_loss(self.kl.type, logprobs, columns["ref_logprobs"], ratio)
            metrics["kl_ref"] = kl
            if self.kl.coef:
                losses = losses + self.kl.coef * kl
        return losses, metrics
