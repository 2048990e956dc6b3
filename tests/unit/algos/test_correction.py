"""Rollout correction against a slow version: Python floats, one sequence and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.correction import Correction, correct_rollouts

Token = tuple[bool, float, float]
"""Trained, the trainer's log-probability, the engine's."""

TOKEN = st.tuples(st.booleans(), st.floats(-3, 0), st.floats(-3, 0))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=5)
OFF: dict[str, Any] = {
    "weights": None,
    "weight_high": 2.0,
    "weight_low": 0.5,
    "reject": None,
    "reject_high": 3.0,
    "reject_low": 0.3,
    "veto_below": None,
}


def _correct(sequences: list[list[Token]], **settings_: Any) -> Correction:
    flat = [token for sequence in sequences for token in sequence]
    segments = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(s) for s in sequences]))
    mask, old, rollout = (torch.tensor(column) for column in zip(*flat, strict=True))
    return correct_rollouts(old, rollout, mask, segments, len(sequences), **{**OFF, **settings_})


def _ratios(sequence: list[Token]) -> tuple[list[float], float, float, float]:
    """Each token's rho, the product, the geometric mean, the smallest."""
    logs = [float(torch.tensor(old)) - float(torch.tensor(rollout)) for trained, old, rollout in sequence if trained]
    rhos = [math.exp(old - rollout) if trained else 1.0 for trained, old, rollout in sequence]
    total = math.fsum(logs)
    return rhos, math.exp(total), math.exp(total / max(len(logs), 1)), math.exp(min([0.0, *logs]))


def _slow_weight(sequence: list[Token], kind: str, t: int) -> float:
    rhos, product, _, _ = _ratios(sequence)
    if kind == "token":
        return min(rhos[t], 2.0)
    if kind == "sequence":
        return min(product, 2.0)
    return rhos[t] if 0.5 <= rhos[t] <= 2.0 else 0.0


@pytest.mark.parametrize("kind", ["token", "sequence", "icepop"])
@settings(max_examples=25, deadline=None)
@given(sequences=SEQUENCES)
def test_weights_equal_a_loop_over_tokens(kind: str, sequences: list[list[Token]]) -> None:
    found = _correct(sequences, weights=kind)
    assert found.weights is not None
    wanted = [_slow_weight(s, kind, t) if s[t][0] else 1.0 for s in sequences for t in range(len(s))]
    assert found.weights.tolist() == pytest.approx(wanted, rel=1e-5)
    trained = [token[0] for sequence in sequences for token in sequence]
    assert found.kept.tolist() == trained, "weights reject nothing"
    if any(trained):
        of_trained = [weight for weight, on in zip(wanted, trained, strict=True) if on]
        assert found.metrics["correction/weight_mean"] == pytest.approx(sum(of_trained) / len(of_trained), rel=1e-5)
        zero = sum(weight == 0.0 for weight in of_trained) / len(of_trained)
        assert found.metrics["correction/weight_zero_share"] == pytest.approx(zero)


@pytest.mark.parametrize("kind", ["token", "sequence", "geometric", None])
@settings(max_examples=25, deadline=None)
@given(sequences=SEQUENCES, veto=st.none() | st.just(0.4))
def test_rejection_and_veto_equal_a_loop_over_tokens(
    kind: str | None, veto: float | None, sequences: list[list[Token]]
) -> None:
    found = _correct(sequences, reject=kind, veto_below=veto)
    wanted, vetoes = [], 0
    for sequence in sequences:
        rhos, product, geometric, smallest = _ratios(sequence)
        vetoed = veto is not None and smallest < veto
        vetoes += vetoed
        of_sequence = {"sequence": product, "geometric": geometric}.get(kind or "", 1.0)
        for (trained, _, _), rho in zip(sequence, rhos, strict=True):
            judged = rho if kind == "token" else of_sequence
            wanted.append(trained and not vetoed and 0.3 <= judged <= 3.0)
    assert found.kept.tolist() == wanted and found.weights is None
    assert found.metrics["correction/vetoed_sequences"] == vetoes
    trained_tokens = sum(token[0] for sequence in sequences for token in sequence)
    masked = found.metrics["correction/masked_share"]
    assert masked == pytest.approx((trained_tokens - sum(wanted)) / max(trained_tokens, 1))


def test_no_mismatch_changes_nothing() -> None:
    sequence: list[Token] = [(False, 0.0, 0.0), (True, -1.0, -1.0), (True, -2.0, -2.0)]
    for kind in ("token", "sequence", "icepop"):
        found = _correct([sequence], weights=kind, reject="geometric", veto_below=1e-4)
        assert found.weights is not None
        assert found.weights.tolist() == [1.0, 1.0, 1.0] and found.kept.tolist() == [False, True, True]
        assert found.metrics["correction/weight_mean"] == 1.0 and found.metrics["correction/masked_share"] == 0.0


def test_an_impossible_token_is_counted_and_vetoed() -> None:
    """An engine that gave a token a probability that the trainer puts at e^-60."""
    found = _correct([[(True, -60.0, -0.1), (True, -1.0, -1.0)], [(True, -1.0, -1.0)]], veto_below=1e-4)
    assert found.kept.tolist() == [False, False, True]
    assert found.metrics["correction/vetoed_sequences"] == 1.0
    assert found.metrics["correction/masked_share"] == pytest.approx(2 / 3)
