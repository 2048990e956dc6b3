"""Names, aggregation and the policy objective. Each estimator and loss is in test_algos_*.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.correction import mismatch_metrics
from megatron_rl.algos.groups import flat_groups
from megatron_rl.algos.losses.base import LossTokens
from megatron_rl.algos.losses.ppo_clip import PpoClip
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import KlTerm, UpdateLoss


def test_flat_groups_are_found_whatever_their_score() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert flat_groups(scores, torch.tensor([0, 0, 1, 1, 2, 2])).tolist() == [True, True, True, True, False, False]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=12))
def test_ppo_clip_equals_a_loop_over_tokens(tokens: list[tuple[float, float, float]]) -> None:
    new, old, adv = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    clip = PpoClip(clip_ratio_high=0.28, clip_ratio_c=None)
    losses, values = clip(LossTokens(new, old, adv))
    for i, (lp, lo, a) in enumerate(tokens):
        ratio = math.exp(lp - lo)
        free, clipped = ratio * a, min(max(ratio, 0.8), 1.28) * a
        assert float(losses[i]) == pytest.approx(-min(free, clipped))
        assert float(values["clip_frac"][i]) == (1.0 if clipped < free else 0.0)


def test_n7_ratio_is_one_where_old_logprobs_are_the_policys_own() -> None:
    """N7: without an old_logprobs column the ratio is exactly 1, and the gradient is that of -A log p."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    losses, values = UpdateLoss(PpoClip())(logprobs, torch.zeros(3), {"advantages": advantages})
    losses.sum().backward()
    assert values["ratio"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(logprobs.grad, -advantages)  # type: ignore[arg-type]


def test_entropy_bonus_and_kl_enter_the_objective_with_their_coefficients() -> None:
    logprobs, ref, entropy = torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([0.7])
    objective = UpdateLoss(PpoClip(), entropy_coeff=0.1, kl=KlTerm(2.0, "k2"))
    losses, values = objective(logprobs, entropy, {"advantages": torch.tensor([3.0]), "ref_logprobs": ref})
    assert float(losses) == pytest.approx(-3.0 - 0.1 * 0.7 + 2.0 * 0.125)
    assert float(values["kl_ref"]) == pytest.approx(0.125)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_weights_equal_the_published_formula(mode: str) -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    segments = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    losses = torch.tensor([9.0, 1.0, 2.0, 9.0, 4.0, 9.0, 9.0])
    wanted = {
        "token-mean": (1 + 2 + 4) / 3,
        "seq-mean-token-sum": ((1 + 2) + 4) / 2,
        "seq-mean-token-mean": ((1 + 2) / 2 + 4) / 2,
        "seq-mean-token-sum-norm": ((1 + 2) + 4) / (2 * 10),
    }[mode]
    weights = loss_weights(mode, mask, segments, 3, norm_length=10)
    assert float((weights * losses).sum()) == pytest.approx(wanted)


def test_loss_weights_of_nothing_are_zero() -> None:
    weights = loss_weights("token-mean", torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1, 1)
    assert weights.tolist() == [0.0, 0.0, 0.0]


def test_n8_mismatch_metrics() -> None:
    """N8: mean, p99, maximum and KL of the gap between engine and trainer."""
    train = torch.zeros(1000)
    rollout = torch.zeros(1000)
    rollout[:10] = 1.0
    rollout[10] = -3.0
    found = mismatch_metrics(train, rollout)
    assert found["mismatch/abs_mean"] == pytest.approx(13 / 1000)
    assert found["mismatch/abs_p99"] == 1.0
    assert found["mismatch/abs_max"] == 3.0
    assert found["mismatch/kl"] == pytest.approx(7 / 1000)
