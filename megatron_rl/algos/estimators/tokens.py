"""What an estimator per token works on: the sequences of one data-parallel rank. T tokens, S sequences end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import Moments, Sums, alone, length_adaptive_lam, moments_of
from megatron_rl.algos.scan import TORCH, CreditKernels, KlPenalty, TokenScan, counted_tokens


@dataclass(frozen=True)
class CreditTokens:
    """Rewards and masks of a rank's tokens. Statistics are over all ranks: every rank must call the same methods."""

    scores: torch.Tensor
    """[T] float32: the score on each sequence's last trained token, 0 elsewhere"""
    loss_mask: torch.Tensor
    """[T] bool"""
    segment_ids: torch.Tensor
    """[T] int64: sequence of each token, ascending"""
    num_sequences: int
    kept: torch.Tensor | None = None
    """[S] bool: sequences whose group is in the update; all if not given. Statistics of the batch are over these."""
    greedy_scores: torch.Tensor | None = None
    """[S] score of the greedy response to each sequence's prompt, for estimators that need it"""
    values: torch.Tensor | None = None
    """[T] float32: the critic's values, for estimators that need them"""
    add_up: Sums = alone
    """Adds float64 sums over the data-parallel ranks"""
    kl: KlPenalty | None = None
    """What is taken off the reward of each trained token, its columns [T]; nothing if not given."""
    kernels: CreditKernels = TORCH
    """What computes it"""

    @property
    def rewards(self) -> torch.Tensor:
        """[T] float32: the scores, less the KL penalty on every trained token."""
        if self.kl is None:
            return self.scores
        return torch.where(self.loss_mask, self.scores - self.kl.of_tokens(), self.scores).float()

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[S + 1] int64: the first token of each sequence, and T."""
        return torch.searchsorted(self.segment_ids, torch.arange(self.num_sequences + 1))

    def scan_rewards(self, gamma: float) -> TokenScan:
        """G_t = r_t + gamma G_{t+1} as advantages, and their moments."""
        return self._scan(None, gamma, 1.0, None)

    def rewards_to_go(self, gamma: float) -> torch.Tensor:
        """G_t = r_t + gamma G_{t+1}, [T] float32, 0 where loss_mask is False."""
        return self.scan_rewards(gamma).advantages

    def gae(self, gamma: float, lam: float | torch.Tensor, critic_lam: float) -> TokenScan:
        """Advantages and returns (megatron_rl.algos.gae), and the advantages' moments."""
        if self.values is None:
            raise ValueError("GAE needs a critic's values, and these tokens have none; train a critic (critic.enable)")
        return self._scan(self.values, gamma, lam, critic_lam)

    def _scan(
        self, values: torch.Tensor | None, gamma: float, lam: float | torch.Tensor, critic_lam: float | None
    ) -> TokenScan:
        return self.kernels.scan(
            self.scores,
            values,
            self.loss_mask,
            self.cu_seqlens,
            gamma=gamma,
            lam=lam,
            critic_lam=critic_lam,
            kept=self.kept,
            kl=self.kl,
        )

    def length_adaptive_lam(self, alpha: float) -> torch.Tensor:
        """[S] float64: lambda of each sequence by its trained tokens (megatron_rl.algos.gae)."""
        return length_adaptive_lam(self.loss_mask, self.segment_ids, self.num_sequences, alpha)

    def greedy_baseline(self) -> torch.Tensor:
        """[T] float64: the greedy response's score on each token."""
        if self.greedy_scores is None:
            raise ValueError("this estimator needs the scores of greedy responses, and these tokens have none")
        return self.greedy_scores.double()[self.segment_ids]

    def whiten(self, values: torch.Tensor, moments: Moments | None = None) -> torch.Tensor:
        """[T] -> [T] float32: mean 0 and deviation 1 over the trained tokens of kept sequences of all ranks.

        moments: of this rank's values, if a scan gave them; all ranks give them, or none.
        """
        cu_seqlens = self.cu_seqlens
        if moments is None:
            moments = moments_of(values, counted_tokens(self.loss_mask, cu_seqlens, self.kept))
        mean, std = moments.over_ranks(self.add_up)
        return self.kernels.whiten(values, self.loss_mask, cu_seqlens, self.kept, mean, std)
