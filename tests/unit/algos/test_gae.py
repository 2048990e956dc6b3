"""GAE, whitening and the value loss against loops over tokens in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.gae import gae, length_adaptive_lam, whiten
from megatron_rl.algos.values import value_loss, value_metrics

TOKEN = st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=7), min_size=1, max_size=6)
Token = tuple[bool, float, float]


def _pack(sequences: list[list[Token]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = torch.tensor([trained for sequence in sequences for trained, _, _ in sequence])
    rewards = torch.tensor([r if trained else 0.0 for sequence in sequences for trained, r, _ in sequence])
    values = torch.tensor([v for sequence in sequences for _, _, v in sequence])
    segments = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(s) for s in sequences]))
    return rewards, values, mask, segments


def _slow_gae(sequence: list[Token], gamma: float, lam: float) -> list[float | None]:
    """One sequence, one token at a time, from the last: None at observation tokens."""
    found: list[float | None] = []
    value_after = carried = 0.0
    for trained, reward, value in reversed(sequence):
        if not trained:
            found.append(None)
            continue
        carried = reward + gamma * value_after - value + gamma * lam * carried
        value_after = value
        found.append(carried)
    return found[::-1]


@settings(max_examples=40, deadline=None)
@given(SEQUENCES, st.floats(0, 1), st.floats(0, 1), st.none() | st.floats(0, 1))
def test_n5_gae_equals_a_float64_loop(
    sequences: list[list[Token]], gamma: float, lam: float, critic_lam: float | None
) -> None:
    """N5: any mask, observation tokens anywhere; the critic's lambda apart from the policy's or not."""
    advantages, returns = gae(*_pack(sequences), gamma=gamma, lam=lam, critic_lam=critic_lam)
    at = 0
    for sequence in sequences:
        wanted = _slow_gae(sequence, gamma, lam)
        for_critic = _slow_gae(sequence, gamma, lam if critic_lam is None else critic_lam)
        for (_, _, value), a, c in zip(sequence, wanted, for_critic, strict=True):
            assert float(advantages[at]) == pytest.approx(a or 0.0, rel=1e-5, abs=1e-6)
            assert float(returns[at]) == pytest.approx(0.0 if c is None else value + c, rel=1e-5, abs=1e-6)
            at += 1


def test_n5_observation_tokens_change_nothing() -> None:
    """N5: the same trained tokens with observations in between have the same advantages."""
    plain: list[Token] = [(False, 0, 9), (True, 0, 0.3), (True, 0, 0.5), (True, 1, 0.7)]
    mixed: list[Token] = [*plain[:2], (False, 0, -8), (False, 0, 4), *plain[2:3], (False, 0, 1), plain[3]]
    rewards, values, mask, segments = _pack([plain, mixed])
    advantages, returns = gae(rewards, values, mask, segments, gamma=0.9, lam=0.8)
    for column in (advantages, returns):
        trained = column[mask]
        assert torch.equal(trained[:3], trained[3:]) and bool((column[~mask] == 0).all())


def test_lambda_one_without_discount_is_return_minus_value() -> None:
    sequence: list[Token] = [(True, 0.5, 0.1), (True, 0.0, -0.2), (True, 2.0, 0.4)]
    advantages, returns = gae(*_pack([sequence]), gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([2.5, 2.0, 2.0])
    assert advantages.tolist() == pytest.approx([2.4, 2.2, 1.6])


def test_length_adaptive_lambda_of_each_sequence() -> None:
    """VAPO: 1 - 1 / (alpha l); each sequence is scanned with its own."""
    sequences: list[list[Token]] = [[(True, 1.0, 0.5)] * 40, [(True, 1.0, 0.5)] * 100, [(True, 1.0, 0.5)] * 3]
    rewards, values, mask, segments = _pack(sequences)
    lam = length_adaptive_lam(mask, segments, 3, alpha=0.05)
    assert lam.tolist() == pytest.approx([1 - 1 / 2.0, 1 - 1 / 5.0, 0.0])
    advantages, returns = gae(rewards, values, mask, segments, gamma=0.99, lam=lam, critic_lam=1.0)
    wanted = [a for s, one in zip(sequences, lam.tolist(), strict=True) for a in _slow_gae(s, 0.99, one)]
    assert advantages.tolist() == pytest.approx(wanted, rel=1e-5)
    assert returns.tolist() == pytest.approx([0.5 + (a or 0) for s in sequences for a in _slow_gae(s, 0.99, 1.0)])


def test_a_reward_off_the_trained_tokens_is_refused() -> None:
    rewards, mask = torch.tensor([0.0, 1.0]), torch.tensor([True, False])
    with pytest.raises(ValueError, match="1 rewards lie on tokens that are not trained"):
        gae(rewards, torch.zeros(2), mask, torch.zeros(2, dtype=torch.int64), gamma=1.0, lam=1.0)


def test_nothing_trained_gives_zeros() -> None:
    mask, segments = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    advantages, returns = gae(torch.zeros(3), torch.ones(3), mask, segments, gamma=1.0, lam=0.9)
    assert advantages.tolist() == returns.tolist() == whiten(torch.ones(3), mask).tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=12), st.booleans())
def test_whitening_equals_a_loop_and_leaves_equal_values_at_zero(
    tokens: list[tuple[float, bool]], shift_mean: bool
) -> None:
    values, mask = torch.tensor([v for v, _ in tokens]), torch.tensor([m for _, m in tokens])
    found = whiten(values, mask, shift_mean=shift_mean).tolist()
    picked = [float(v) for v, m in zip(values, mask, strict=True) if m]
    mean = math.fsum(picked) / max(len(picked), 1)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in picked) / max(len(picked) - 1, 1))
    for got, value, trained in zip(found, values.tolist(), mask.tolist(), strict=True):
        flat = len(set(picked)) == 1
        wanted = (0.0 if flat else (value - mean) / (std + 1e-8)) + (0.0 if shift_mean else mean)
        assert got == pytest.approx(wanted if trained else 0.0, rel=1e-5, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-2, 2)] * 3), min_size=1, max_size=8), st.none() | st.floats(0.05, 1))
def test_value_loss_equals_a_loop_over_tokens(
    tokens: list[tuple[float, float, float]], clip_range: float | None
) -> None:
    new, old, wanted = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    losses, values = value_loss(new, old, wanted, clip_range=clip_range)
    for i, (v, o, r) in enumerate(tokens):
        loss = (v - r) ** 2
        if clip_range is not None:
            loss = max(loss, (min(max(v, o - clip_range), o + clip_range) - r) ** 2)
        assert float(losses[i]) == pytest.approx(loss / 2, abs=1e-12)
    assert ("vf_clip_frac" in values) == (clip_range is not None)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([True, True, True, False])

    def explained(values: torch.Tensor, of: torch.Tensor) -> float:
        return value_metrics(values, of, mask)["critic/explained_variance"]

    assert explained(returns, returns) == 1.0
    assert explained(torch.full((4,), 5.0), returns) == pytest.approx(0.0)
    assert math.isnan(explained(returns, torch.ones(4)))
