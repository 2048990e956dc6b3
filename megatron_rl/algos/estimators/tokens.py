"""What an estimator per token works on: the sequences of one data-parallel rank. T tokens, S sequences end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import Sums, alone, discounted_sums, gae, length_adaptive_lam, whiten


@dataclass(frozen=True)
class CreditTokens:
    """Rewards and masks of a rank's tokens. Statistics are over all ranks: every rank must call the same methods."""

    rewards: torch.Tensor
    """[T] float32: the score on each sequence's last trained token, less the KL penalty on every token"""
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

    def rewards_to_go(self, gamma: float) -> torch.Tensor:
        """G_t = r_t + gamma G_{t+1}, [T] float32, 0 where loss_mask is False."""
        return discounted_sums(self.rewards, self.loss_mask, self.segment_ids, gamma=gamma)

    def gae(self, gamma: float, lam: float | torch.Tensor, critic_lam: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns (megatron_rl.algos.gae), both [T] float32."""
        if self.values is None:
            raise ValueError("GAE needs a critic's values, and these tokens have none; train a critic (critic.enable)")
        mask, segments = self.loss_mask, self.segment_ids
        return gae(self.rewards, self.values, mask, segments, gamma=gamma, lam=lam, critic_lam=critic_lam)

    def length_adaptive_lam(self, alpha: float) -> torch.Tensor:
        """[S] float64: lambda of each sequence by its trained tokens (megatron_rl.algos.gae)."""
        return length_adaptive_lam(self.loss_mask, self.segment_ids, self.num_sequences, alpha)

    def greedy_baseline(self) -> torch.Tensor:
        """[T] float64: the greedy response's score on each token."""
        if self.greedy_scores is None:
            raise ValueError("this estimator needs the scores of greedy responses, and these tokens have none")
        return self.greedy_scores.double()[self.segment_ids]

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        """[T] -> [T] float32: mean 0 and deviation 1 over the trained tokens of kept sequences of all ranks."""
        counted = self.loss_mask if self.kept is None else self.loss_mask & self.kept[self.segment_ids]
        return whiten(values, counted, add_up=self.add_up)
