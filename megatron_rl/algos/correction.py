"""Train-inference mismatch: its metrics (contract N8), and importance-sampling correction.

The engine samples with one program and perhaps older weights, the trainer computes with another. rho = p_trainer /
p_engine of a sampled token is what importance sampling weighs it by. Letters: S sequences, T tokens end to end.
"""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import Sums, alone
from megatron_rl.algos.groups import sequence_sums

_LOG_RATIO_CAP = 20.0


def mismatch_metrics(
    train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, add_up: Sums = alone
) -> dict[str, float]:
    """Same weights, same tokens, two programs: [n] log-probabilities of each -> mean, p99, max of |difference|, and KL,
    over the tokens of all ranks.

    kl is E[log p_rollout - log p_train] over sampled tokens: an estimate of KL(rollout || train), the k1 form. Tokens
    where either is not finite are counted in nonfinite_tokens, and left out of the others.
    """
    gap = (rollout_logprobs - train_logprobs).float()
    finite = torch.isfinite(gap)
    size = gap[finite].abs()
    total = gap[finite].double()
    sums = add_up(torch.stack([(~finite).sum().double(), finite.sum().double(), total.abs().sum(), total.sum()]))
    broken, count, absolute, signed = sums.tolist()
    if not broken + count:
        return {}
    counts = {"mismatch/nonfinite_tokens": broken}
    if not count:
        return counts
    p99, largest = order_statistics(size, [max(1, int(count * 0.99)), int(count)], add_up)
    return counts | {
        "mismatch/abs_mean": absolute / count,
        "mismatch/abs_p99": p99,
        "mismatch/abs_max": largest,
        "mismatch/kl": signed / count,
    }


def order_statistics(values: torch.Tensor, places: Sequence[int], add_up: Sums = alone) -> list[float]:
    """The k-th smallest, for each k of `places` (from 1), of the values of all ranks: exact, and no value travels.

    values: [n] float32, none negative or NaN: their bit patterns are then in the values' order. Three histograms of 11
    and 10 bits are added up over ranks, each within the range that the one before leaves.
    """
    bits = values.float().view(torch.int32).long()
    found: list[float] = []
    for place in places:
        pattern, rest, inside = 0, place, bits
        for shift, width in ((20, 11), (10, 10), (0, 10)):
            digits = (inside >> shift) & ((1 << width) - 1)
            ends = add_up(torch.bincount(digits, minlength=1 << width)).cumsum(0)
            digit = int(torch.searchsorted(ends, rest))
            rest -= int(ends[digit - 1]) if digit else 0
            pattern |= digit << shift
            inside = inside[digits == digit]
        found.append(float(torch.tensor(pattern, dtype=torch.int32).view(torch.float32)))
    return found


@dataclass(frozen=True)
class Correction:
    """What becomes of each token."""

    weights: torch.Tensor | None
    """[T] float32 factors of the policy loss, 1 off the mask; None where none are asked for"""
    kept: torch.Tensor
    """[T] bool: loss_mask without what was rejected"""
    metrics: dict[str, float]
    """counts and shares of what was done, correction/..."""


@dataclass(frozen=True)
class _Ratios:
    """rho of the trained tokens and of their sequences."""

    token: torch.Tensor
    """[T] float64, 1 off the mask"""
    product: torch.Tensor
    """[S] product over the sequence"""
    geometric: torch.Tensor
    """[S] geometric mean over the sequence"""
    smallest: torch.Tensor
    """[S] smallest of the sequence; 1 where none is smaller"""


def _ratios(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    segment_ids: torch.Tensor,
    num_sequences: int,
) -> _Ratios:
    log_ratio = torch.where(loss_mask, (old_logprobs - rollout_logprobs).double(), 0.0)
    sums = sequence_sums(log_ratio, segment_ids, num_sequences)
    counts = sequence_sums(loss_mask, segment_ids, num_sequences).clamp(min=1)
    smallest = torch.zeros(num_sequences, dtype=torch.float64)
    smallest = smallest.scatter_reduce(0, segment_ids, log_ratio, "amin")

    def exp(logs: torch.Tensor) -> torch.Tensor:
        return torch.exp(logs.clamp(-_LOG_RATIO_CAP, _LOG_RATIO_CAP))

    return _Ratios(exp(log_ratio), exp(sums), exp(sums / counts), exp(smallest))


def correct_rollouts(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    segment_ids: torch.Tensor,
    num_sequences: int,
    *,
    weights: str | None,
    weight_high: float,
    weight_low: float,
    reject: str | None,
    reject_high: float,
    reject_low: float,
    veto_below: float | None,
    add_up: Sums = alone,
) -> Correction:
    """Weights and rejections from rho, all [T] columns. The metrics are of the sequences of all ranks.

    weights: token      min(rho, high)                           token TIS, Yao et al. 2025
             sequence   min(product of rho over the sequence, high) on each of its tokens    sequence TIS
             icepop     rho where low <= rho <= high, else 0     IcePop, Ling Team 2025
    reject:  token      tokens with rho outside [reject_low, reject_high] leave the loss
             sequence   sequences whose product is outside do
             geometric  sequences whose geometric mean is outside do
    veto_below: a sequence with any rho below it leaves the loss.
    A rejected token leaves the mask, and so the loss's denominators; one with weight 0 stays in them.
    """
    ratios = _ratios(old_logprobs, rollout_logprobs, loss_mask, segment_ids, num_sequences)
    kept = loss_mask.clone()
    vetoed = torch.zeros(num_sequences, dtype=torch.bool)
    rejected = torch.zeros(num_sequences, dtype=torch.bool)
    if veto_below is not None:
        vetoed = ratios.smallest < veto_below
    if reject == "token":
        kept &= (ratios.token >= reject_low) & (ratios.token <= reject_high)
    elif reject is not None:
        of_sequence = {"sequence": ratios.product, "geometric": ratios.geometric}[reject]
        rejected = (of_sequence < reject_low) | (of_sequence > reject_high)
    kept &= ~(vetoed | rejected)[segment_ids]
    found, untouched = _weights(ratios, segment_ids, weights, weight_high, weight_low)
    sums = add_up(
        torch.tensor(
            [
                float(loss_mask.sum()),
                float((~kept & loss_mask).sum()),
                float(rejected.sum()),
                float(vetoed.sum()),
                float(kept.sum()),
                *([0.0] * 3 if found is None else _weight_sums(found, untouched, kept)),
            ],
            dtype=torch.float64,
        )
    ).tolist()
    metrics = {
        "correction/masked_share": sums[1] / max(sums[0], 1.0),
        "correction/rejected_sequences": sums[2],
        "correction/vetoed_sequences": sums[3],
    }
    if found is not None:
        metrics |= {
            "correction/weight_mean": sums[5] / sums[4] if sums[4] else float("nan"),
            "correction/weight_zero_share": sums[6] / max(sums[4], 1.0),
            "correction/weight_cut_share": sums[7] / max(sums[4], 1.0),
        }
        found = torch.where(loss_mask, found, 1.0).float()
    return Correction(found, kept, metrics)


def _weight_sums(weights: torch.Tensor, untouched: torch.Tensor, kept: torch.Tensor) -> list[float]:
    """Over the kept tokens: the weights, how many are 0, how many are not the ratio itself."""
    counts = (weights[kept].sum(), ((weights == 0) & kept).sum(), (~untouched & kept).sum())
    return [float(count) for count in counts]


def _weights(
    ratios: _Ratios, segment_ids: torch.Tensor, kind: str | None, high: float, low: float
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """[T] float64 weights, and where they are the ratio itself."""
    if kind is None:
        return None, torch.ones(len(segment_ids), dtype=torch.bool)
    ratio = ratios.product[segment_ids] if kind == "sequence" else ratios.token
    if kind == "icepop":
        inside = (ratio >= low) & (ratio <= high)
        return torch.where(inside, ratio, 0.0), inside
    return ratio.clamp(max=high), ratio <= high
