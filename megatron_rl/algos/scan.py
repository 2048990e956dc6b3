"""One pass over the tokens of a rank, in torch: advantages, returns and the statistics that whitening needs.

What can be computed by built kernels instead (ops/advantages.py) has its type here, as CreditKernels. Letters: T
tokens, S sequences. Sequences are packed, [T] with cu_seqlens [S + 1] int64 (where each begins, and T), or padded,
[S, time] without.
"""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.algos.gae import Moments, gae, moments_of, scaled
from megatron_rl.algos.groups import group_moments
from megatron_rl.algos.kl import KL_ESTIMATORS


@dataclass(frozen=True)
class KlPenalty:
    """What is taken off the reward of each trained token: coef times an estimate of KL(policy || reference)."""

    coef: float
    terms: torch.Tensor
    """the estimate of each token; the policy's log-probability if ref is given. In the shape of the rewards"""
    ref: torch.Tensor | None = None
    """the reference's log-probability"""
    estimator: str = "k1"
    """a key of KL_ESTIMATORS, for log-probabilities"""

    def of_tokens(self) -> torch.Tensor:
        """float64, in the shape of the rewards."""
        terms = self.terms.double()
        return self.coef * (terms if self.ref is None else KL_ESTIMATORS[self.estimator](terms, self.ref.double()))


@dataclass(frozen=True)
class TokenScan:
    """Advantages and returns are float32 in the shape of the rewards, 0 on tokens that are not trained."""

    advantages: torch.Tensor
    returns: torch.Tensor
    moments: Moments
    """of the advantages of trained tokens of kept sequences"""


class ScanTokens(Protocol):
    """See `scan`."""

    def __call__(
        self,
        rewards: torch.Tensor,
        values: torch.Tensor | None,
        loss_mask: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        *,
        gamma: float,
        lam: float | torch.Tensor,
        critic_lam: float | torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        kl: KlPenalty | None = None,
    ) -> TokenScan: ...


class WhitenTokens(Protocol):
    """See `whiten_kept`."""

    def __call__(
        self,
        values: torch.Tensor,
        loss_mask: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        kept: torch.Tensor | None,
        mean: torch.Tensor,
        std: torch.Tensor,
        *,
        shift_mean: bool = True,
    ) -> torch.Tensor: ...


def scan(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    critic_lam: float | torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    kl: KlPenalty | None = None,
) -> TokenScan:
    """GAE (algos/gae.py) of packed or padded sequences, in float64 whatever the inputs are.

    rewards, values: float32 or bfloat16; without values, they are 0, and returns are the advantages. loss_mask: bool.
    lam, critic_lam: a number, or [S] float64; kept: [S] bool, whose sequences count in the moments, by default all.
    Raises ValueError where a reward lies on a token that is not trained; NaN and infinities are carried on.
    """
    segment_ids = segments_of(loss_mask, cu_seqlens)
    shape, mask = rewards.shape, loss_mask.reshape(-1)
    total = rewards.reshape(-1).double()
    if kl is not None:
        total = torch.where(mask, total - kl.of_tokens().reshape(-1), total)
    known = torch.zeros_like(total) if values is None else values.reshape(-1)
    count = len(loss_mask) if cu_seqlens is None else len(cu_seqlens) - 1
    found = gae(total, known, mask, segment_ids, gamma=gamma, lam=lam, critic_lam=critic_lam, num_sequences=count)
    advantages, returns = (column.reshape(shape) for column in found)
    counted = counted_tokens(loss_mask, cu_seqlens, kept)
    return TokenScan(advantages, advantages if values is None else returns, moments_of(advantages, counted))


def whiten_kept(
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    kept: torch.Tensor | None,
    mean: torch.Tensor,
    std: torch.Tensor,
    *,
    shift_mean: bool = True,
) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) on trained tokens of kept sequences, 0 elsewhere; float32 in the shape of values."""
    return scaled(values, counted_tokens(loss_mask, cu_seqlens, kept), mean, std, shift_mean=shift_mean)


def counted_tokens(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
    """The mask less the sequences that are not kept."""
    if kept is None:
        return loss_mask
    return loss_mask & kept[segments_of(loss_mask, cu_seqlens)].reshape(loss_mask.shape)


def segments_of(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """[T] int64: the sequence of each token. Raises ValueError if cu_seqlens cannot be."""
    if cu_seqlens is None:
        rows = torch.arange(loss_mask.shape[0], device=loss_mask.device)
        return rows.repeat_interleave(loss_mask.shape[1])
    lens = cu_seqlens.diff()
    if len(cu_seqlens) == 0 or int(cu_seqlens[0]) or int(cu_seqlens[-1]) != len(loss_mask) or bool((lens < 0).any()):
        raise ValueError("cu_seqlens must go from 0 to the number of tokens and not descend")
    return torch.arange(len(lens), device=lens.device).repeat_interleave(lens)


@dataclass(frozen=True)
class CreditKernels:
    """What computes credit: the torch code of this file, or built kernels with the same results."""

    scan: ScanTokens = scan
    whiten: WhitenTokens = whiten_kept
    group_moments: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = group_moments


TORCH = CreditKernels()
