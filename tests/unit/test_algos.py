"""Advantages, KL, losses and aggregation against slow, independent versions."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos import ADVANTAGES, LOSSES
from megatron_rl.algos.advantages import AdvantageInputs, flat_groups
from megatron_rl.algos.correction import mismatch_metrics
from megatron_rl.algos.kl import KL_ESTIMATORS
from megatron_rl.algos.losses import PolicyInputs, policy_objective, ppo_clip_loss
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.config.names import ADV_ESTIMATORS, LOSS_MODES


def test_config_names_equal_the_registries() -> None:
    assert ADVANTAGES.keys() == set(ADV_ESTIMATORS)
    assert LOSSES.keys() == set(LOSS_MODES)


def _inputs(scores: list[float], groups: list[int], lengths: list[int], norm: bool) -> AdvantageInputs:
    """Sequences with one prompt token before each response; the score on the last token."""
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) + 1)
    mask = torch.cat([torch.tensor([False] + [True] * n) for n in lengths])
    rewards = torch.zeros(len(mask))
    rewards[torch.cumsum(torch.tensor(lengths) + 1, 0) - 1] = torch.tensor(scores)
    return AdvantageInputs(rewards, mask, segments, torch.tensor(groups), norm)


SAMPLES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(0, 3), st.integers(1, 4)),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.booleans())
def test_n5_grpo_equals_a_float64_reference(samples: list[tuple[float, int, int]], norm: bool) -> None:
    """N5: one group at a time in Python floats; flat groups are exactly 0, never NaN."""
    ids = sorted({group for _, group, _ in samples})
    scores, groups, lengths = (
        [s for s, _, _ in samples],
        [ids.index(g) for _, g, _ in samples],
        [n for _, _, n in samples],
    )
    found = ADVANTAGES["grpo"](_inputs(scores, groups, lengths, norm))
    start = 0
    for score, group, length in zip(scores, groups, lengths, strict=True):
        members = [float(torch.tensor(s)) for s, g in zip(scores, groups, strict=True) if g == group]
        wanted = float(torch.tensor(score)) - statistics.fmean(members)
        if norm:
            wanted /= (statistics.stdev(members) if len(members) > 1 else 0.0) + 1e-6
        if len(set(members)) == 1:
            wanted = 0.0
            assert bool((found[start : start + length + 1] == 0).all())
        assert found[start] == 0.0, "prompt tokens have no advantage"
        assert found[start + 1 : start + length + 1].tolist() == pytest.approx([wanted] * length, rel=1e-5, abs=1e-6)
        start += length + 1


def test_flat_groups_are_found_whatever_their_score() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert flat_groups(scores, torch.tensor([0, 0, 1, 1, 2, 2])).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_n4_kl_gradients_over_a_small_vocabulary(name: str) -> None:
    """N4: the expected on-policy gradient of each estimator, by enumeration, is what its docstring says."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(7, dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    p = logp.detach().exp()
    (found,) = torch.autograd.grad((p * KL_ESTIMATORS[name](logp, ref)).sum(), logits)
    exact = torch.log_softmax(logits, 0)
    (forward,) = torch.autograd.grad((exact.exp() * (exact - ref)).sum(), logits)
    (reverse,) = torch.autograd.grad(-(ref.exp() * torch.log_softmax(logits, 0)).sum(), logits)
    if name == "k1":
        assert found.abs().max() < 1e-12
    elif name == "k2":
        assert torch.allclose(found, forward)
    elif name == "k3":
        assert torch.allclose(found, reverse)
    else:
        assert not torch.allclose(found, forward), "abs is biased, and says so"


def test_kl_values_are_unbiased_for_k1_and_k3() -> None:
    logp, ref = (torch.log_softmax(torch.randn(9, dtype=torch.float64), 0) for _ in range(2))
    exact = float((logp.exp() * (logp - ref)).sum())
    for name in ("k1", "k3"):
        assert float((logp.exp() * KL_ESTIMATORS[name](logp, ref)).sum()) == pytest.approx(exact)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=12))
def test_ppo_clip_equals_a_loop_over_tokens(tokens: list[tuple[float, float, float]]) -> None:
    new, old, adv = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    losses, values = ppo_clip_loss(PolicyInputs(new, old, adv, 0.2, 0.28))
    for i, (lp, lo, a) in enumerate(tokens):
        ratio = math.exp(lp - lo)
        free, clipped = ratio * a, min(max(ratio, 0.8), 1.28) * a
        assert float(losses[i]) == pytest.approx(-min(free, clipped))
        assert float(values["clip_frac"][i]) == (1.0 if clipped < free else 0.0)


def test_n7_ratio_is_one_where_old_logprobs_are_the_policys_own() -> None:
    """N7: without an old_logprobs column the ratio is exactly 1, and the gradient is that of -A log p."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    objective = policy_objective(
        ppo_clip_loss, clip_low=0.2, clip_high=0.2, entropy_coeff=0.0, kl_loss_coef=0.0, kl_loss_type="k3"
    )
    losses, values = objective(logprobs, torch.zeros(3), {"advantages": advantages})
    losses.sum().backward()
    assert values["ratio"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(logprobs.grad, -advantages)  # type: ignore[arg-type]


def test_entropy_bonus_and_kl_enter_the_objective_with_their_coefficients() -> None:
    logprobs, ref, entropy = torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([0.7])
    objective = policy_objective(
        ppo_clip_loss, clip_low=0.2, clip_high=0.2, entropy_coeff=0.1, kl_loss_coef=2.0, kl_loss_type="k2"
    )
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
