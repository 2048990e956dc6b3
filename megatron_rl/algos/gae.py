"""Generalized advantage estimation over packed sequences. Letters: S sequences, T tokens, sequences end to end."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Sums = Callable[[torch.Tensor], torch.Tensor]
"""Adds sums of this rank's tokens up over the ranks that share the batch, or the sequences"""


def alone(sums: torch.Tensor) -> torch.Tensor:
    """The Sums of one rank: as they are."""
    return sums


def gae(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    segment_ids: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    critic_lam: float | torch.Tensor | None = None,
    num_sequences: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both [T] float32, 0 where loss_mask is False.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   return_t = V_t + A_t(critic_lam)

    Schulman et al. 2016 (GAE); with critic_lam apart from lam, Yuan et al. 2025 (VC-PPO) and Yue et al. 2025 (VAPO).
    t + 1 is the next *trained* token of the same sequence: observation tokens (loss_mask False) are skipped, they
    neither discount nor take part. After a sequence's last trained token the value is 0, truncated or not.

    token_rewards, values: [T]; values[t] is the value of the state that token t is sampled in (the tokens before it).
    loss_mask: [T] bool. segment_ids: [T] int64, ascending. lam, critic_lam: a number, or [S] one for each sequence;
    critic_lam is lam when not given. num_sequences: S, if the last ones may be empty. Raises ValueError where a reward
    lies on a token that is not trained.
    """
    stray = int(((token_rewards != 0) & ~loss_mask).sum())
    if stray:
        raise ValueError(f"{stray} rewards lie on tokens that are not trained; put them on trained tokens")
    trained = loss_mask.nonzero().squeeze(-1)
    if num_sequences is None:
        num_sequences = int(segment_ids[-1]) + 1 if len(segment_ids) else 0
    lens = torch.bincount(segment_ids[trained], minlength=num_sequences)
    rewards, known = token_rewards[trained].double(), values[trained].double()
    after = torch.cat([known[1:], known.new_zeros(1)])[: len(known)]
    after[(torch.cumsum(lens, 0) - 1)[lens > 0]] = 0.0
    deltas = rewards + gamma * after - known
    found = _discounted(deltas, lens, gamma, lam)
    for_critic = found if critic_lam is None else _discounted(deltas, lens, gamma, critic_lam)
    advantages, returns = (torch.zeros(len(loss_mask), device=loss_mask.device) for _ in range(2))
    advantages[trained], returns[trained] = found.float(), (known + for_critic).float()
    return advantages, returns


def _discounted(deltas: torch.Tensor, lens: torch.Tensor, gamma: float, lam: float | torch.Tensor) -> torch.Tensor:
    """A_t = delta_t + gamma lam A_{t+1} within each of the sequences of `lens` tokens end to end; [n] float64.

    Goes from all sequences' last tokens to their first at once: as many steps as the longest has tokens, no padding.
    """
    order = torch.argsort(lens, descending=True)
    ends = torch.cumsum(lens, 0)[order]
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64, device=lens.device).expand(len(lens))[order]
    longest = int(lens.max()) if len(lens) else 0
    # Sequences that have a token `back` places before their end: a prefix of `order`, shorter with each step.
    active = torch.searchsorted(lens[order].neg(), torch.arange(longest, device=lens.device).neg()).tolist()
    found = torch.empty_like(deltas)
    carried = torch.zeros(len(lens), dtype=torch.float64, device=lens.device)
    for back, count in enumerate(active):
        at = ends[:count] - 1 - back
        carried = deltas[at] + decay[:count] * carried[:count]
        found[at] = carried
    return found


def length_adaptive_lam(
    loss_mask: torch.Tensor, segment_ids: torch.Tensor, num_sequences: int, alpha: float
) -> torch.Tensor:
    """lam = 1 - 1 / (alpha l) of each sequence, l its trained tokens; [S] float64, never below 0.

    Yue et al. 2025 (VAPO, alpha 0.05): the weights of the TD errors then sum to about alpha l whatever the length.
    Sequences shorter than 1 / alpha would get a negative lambda; theirs is 0.
    """
    lens = torch.bincount(segment_ids[loss_mask], minlength=num_sequences).double()
    return (1.0 - 1.0 / (alpha * lens).clamp(min=1e-12)).clamp(min=0.0)


@dataclass(frozen=True)
class Moments:
    """Of some values of one rank, from which those of all ranks are made. Each a float64 number in a tensor."""

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor
    """sum of squared differences from the mean"""

    def over_ranks(self, add_up: Sums) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and unbiased standard deviation of all ranks' values. Calls add_up twice, also without values."""
        count, total = add_up(torch.stack([self.count, self.count * self.mean]))
        mean = total / count.clamp(min=1)
        squares = add_up(self.squares + self.count * (self.mean - mean).square())
        return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def moments_of(values: torch.Tensor, mask: torch.Tensor) -> Moments:
    """Of the masked values; values: float32 or bfloat16, mask: bool, both of one shape."""
    # Sums of float32 numbers in float64: equal values have an exact mean, and so a deviation of exactly 0.
    picked = values[mask].double()
    count = picked.new_tensor(len(picked))
    mean = picked.sum() / count.clamp(min=1)
    return Moments(count, mean, (picked - mean).square().sum())


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True, add_up: Sums = alone) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) over the masked tokens, [T] float32, 0 elsewhere.

    shift_mean: if False the mean is added back.
    values: [T] float32. mask: [T] bool. std is the unbiased one; values that are all equal (or one alone) become 0.
    The statistics must be those of the global batch: give all of it, or one rank's tokens with add_up, which adds
    float64 sums over the ranks. It is called twice on every rank, also on one without masked tokens.
    """
    mean, std = moments_of(values, mask).over_ranks(add_up)
    return scaled(values, mask, mean, std, shift_mean=shift_mean)


def scaled(
    values: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, *, shift_mean: bool = True
) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) where the mask is, 0 elsewhere, as float32 in the shape of values."""
    whitened = torch.zeros(values.shape, device=values.device)
    centred = values[mask].double() - mean
    whitened[mask] = (centred / (std + 1e-8) + (0.0 if shift_mean else mean)).float()
    return whitened
