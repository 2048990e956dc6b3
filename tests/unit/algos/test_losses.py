"""Each policy loss against a slow version: Python floats, one token at a time; and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.losses import LOSSES
from megatron_rl.algos.losses.base import LossTokens, PolicyLoss
from megatron_rl.algos.losses.cispo import Cispo
from megatron_rl.algos.losses.gspo import Gspo
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.algos.losses.reinforce import Reinforce
from megatron_rl.algos.losses.sapo import Sapo
from megatron_rl.algos.token_losses import KlTerm, UpdateLoss, sequence_means_of

LOW, HIGH, C, TAU_POS, TAU_NEG = 0.2, 0.28, 3.0, 1.0, 1.05
Token = tuple[float, float, float]
"""New log-probability, old one, advantage."""

TOKEN = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-2, 2))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=4)


def _clip(ratio: float) -> float:
    return min(max(ratio, 1 - LOW), 1 + HIGH)


def _ppo_clip(sequence: list[Token], t: int) -> tuple[float, float]:
    new, old, a = sequence[t]
    r = math.exp(new - old)
    surrogate = min(r * a, _clip(r) * a)
    slope = r * a if r * a <= _clip(r) * a else 0.0
    if a < 0 and C * a > surrogate:
        return -C * a, 0.0
    return -surrogate, -slope


def _gspo(sequence: list[Token], t: int) -> tuple[float, float]:
    a = sequence[t][2]
    s = math.exp(math.fsum(new - old for new, old, _ in sequence) / len(sequence))
    return -min(s * a, _clip(s) * a), -(s * a if s * a <= _clip(s) * a else 0.0)


def _cispo(sequence: list[Token], t: int) -> tuple[float, float]:
    new, old, a = sequence[t]
    weight = _clip(math.exp(new - old))
    return -weight * a * new, -weight * a


def _sapo(sequence: list[Token], t: int) -> tuple[float, float]:
    new, old, a = sequence[t]
    r = math.exp(new - old)
    tau = TAU_POS if a > 0 else TAU_NEG
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a


def _reinforce(sequence: list[Token], t: int) -> tuple[float, float]:
    new, _, a = sequence[t]
    return -a * new, -a


SLOW: dict[str, Callable[[list[Token], int], tuple[float, float]]] = {
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
}
"""loss -> (value, derivative by the token's log-probability)"""


def test_every_loss_has_a_slow_version() -> None:
    assert SLOW.keys() == LOSSES.keys()


def _columns(sequences: list[list[Token]]) -> dict[str, torch.Tensor]:
    lens = torch.tensor([len(sequence) for sequence in sequences])
    return {
        "segment_ids": torch.repeat_interleave(torch.arange(len(lens)), lens),
        "sequence_lens": lens,
        "advantages": torch.tensor([a for s in sequences for _, _, a in s], dtype=torch.float64),
        "old_logprobs": torch.tensor([old for s in sequences for _, old, _ in s], dtype=torch.float64),
    }


MADE: dict[str, PolicyLoss] = {
    "ppo_clip": PpoClip(clip_ratio_high=HIGH, clip_ratio_c=C),
    "gspo": Gspo(clip_ratio_low=LOW, clip_ratio_high=HIGH),
    "cispo": Cispo(clip_ratio_low=LOW, clip_ratio_high=HIGH),
    "sapo": Sapo(tau_pos=TAU_POS, tau_neg=TAU_NEG),
    "reinforce": Reinforce(),
}


@pytest.mark.parametrize("name", SLOW)
@settings(max_examples=30, deadline=None)
@given(sequences=SEQUENCES)
def test_losses_and_gradients_equal_a_loop_over_tokens(name: str, sequences: list[list[Token]]) -> None:
    new = torch.tensor([p for s in sequences for p, _, _ in s], dtype=torch.float64, requires_grad=True)
    losses, values = UpdateLoss(MADE[name])(new, torch.zeros_like(new), _columns(sequences))
    losses.sum().backward()
    wanted = [SLOW[name](sequence, t) for sequence in sequences for t in range(len(sequence))]
    assert losses.tolist() == pytest.approx([value for value, _ in wanted], abs=1e-12)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([slope for _, slope in wanted], abs=1e-12)
    assert all(value.shape == losses.shape for value in values.values())


@pytest.mark.parametrize("name", SLOW)
def test_n7_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """N7: without old_logprobs the ratio is exactly 1, and the gradient that of -A log p."""
    sequences = [[(-1.0, 0.0, 1.0), (-2.0, 0.0, -0.5)], [(-0.5, 0.0, 2.0)]]
    columns = {key: column for key, column in _columns(sequences).items() if key != "old_logprobs"}
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    losses, values = UpdateLoss(MADE[name])(new, torch.zeros_like(new), columns)
    losses.sum().backward()
    assert values["ratio"].tolist() == [1.0, 1.0, 1.0]
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1.0, 0.5, -2.0])


@pytest.mark.parametrize("name", SLOW)
def test_a_ratio_beyond_float32_leaves_no_infinity(name: str) -> None:
    """A log-ratio of 200 has no exponential in float32; loss and gradient stay finite on both signs of A."""
    new = torch.tensor([-0.1, -0.1, -200.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.1, -200.1, -0.1, -0.1])
    columns = {
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
        "old_logprobs": old,
        "segment_ids": torch.arange(4),
        "sequence_lens": torch.ones(4, dtype=torch.int64),
    }
    losses, _ = UpdateLoss(MADE[name])(new, torch.zeros(4), columns)
    losses.sum().backward()
    assert new.grad is not None and bool(losses.isfinite().all()) and bool(new.grad.isfinite().all())


def test_rollout_weights_scale_the_policy_loss_alone() -> None:
    """Not the entropy bonus, and not the KL: these are not estimated from the engine's probabilities."""
    new, entropy = torch.tensor([-1.0, -2.0]), torch.tensor([0.7, 0.3])
    columns = {
        "advantages": torch.tensor([3.0, -1.0]),
        "ref_logprobs": torch.tensor([-1.5, -2.5]),
        "rollout_weights": torch.tensor([0.5, 0.0]),
    }
    losses, _ = UpdateLoss(MADE["ppo_clip"], entropy_coeff=0.1, kl=KlTerm(2.0, "k2"))(new, entropy, columns)
    assert losses.tolist() == pytest.approx([0.5 * -3.0 - 0.07 + 0.25, -0.03 + 0.25])


def test_sequence_means_add_up_over_ranks_that_share_the_sequences() -> None:
    """Two ranks with tokens of sequences of 3 and 2: each finds the means of all five, given the sum of both."""
    of_rank = [([0, 1], [1.0, 10.0]), ([0, 0, 1], [2.0, 6.0, 20.0])]
    sums = torch.tensor([9.0, 30.0], dtype=torch.float64)
    for ids, values in of_rank:
        columns = {"segment_ids": torch.tensor(ids), "sequence_lens": torch.tensor([3, 2])}
        means = sequence_means_of(columns, lambda own: own.copy_(sums))(torch.tensor(values))
        assert means.tolist() == [{0: 3.0, 1: 15.0}[i] for i in ids]


def test_dual_clip_counts_the_tokens_it_stops() -> None:
    new, old = torch.log(torch.tensor([0.8, 0.8])), torch.log(torch.tensor([0.1, 0.1]))
    losses, values = PpoClip(clip_ratio_c=3.0)(LossTokens(new, old, torch.tensor([-1.0, 1.0])))
    assert losses.tolist() == pytest.approx([3.0, -1.2])
    assert values["dual_clip_frac"].tolist() == [1.0, 0.0]


def test_a_loss_of_sequences_says_that_it_needs_them() -> None:
    tokens = LossTokens(torch.zeros(1), torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match="no segment_ids"):
        Gspo()(tokens)


def test_settings_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValueError, match="tau_pos"):
        Sapo(tau_pos=-1.0)
    with pytest.raises(ValueError, match="tau"):
        Sapo(**{"tau": 1.0})
