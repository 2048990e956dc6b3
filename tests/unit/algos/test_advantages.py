"""Each estimator without a critic against a slow version: Python floats, one token at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos import ADVANTAGES
from megatron_rl.algos.advantages import AdvantageInputs
from megatron_rl.algos.filters import differing_groups, overlong_penalty

Sequence = tuple[int, list[float]]
"""Group, and the reward of each response token; a prompt token comes before."""

REWARD = st.sampled_from([0.0, 0.0, 0.25, 1.0, -0.5])
SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.lists(REWARD, min_size=1, max_size=5)), min_size=1, max_size=16)
GAMMA = 0.9


def _inputs(samples: list[Sequence]) -> AdvantageInputs:
    lengths = [len(rewards) + 1 for _, rewards in samples]
    ids = sorted({group for group, _ in samples})
    return AdvantageInputs(
        token_rewards=torch.tensor([r for _, rewards in samples for r in [0.0, *rewards]]),
        loss_mask=torch.tensor([trained for n in lengths for trained in [False] + [True] * (n - 1)]),
        segment_ids=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        group_ids=torch.tensor([ids.index(group) for group, _ in samples]),
        norm_by_std=True,
        gamma=GAMMA,
        baselines=torch.tensor([0.5 * group for group in ids]),
    )


def _group(samples: list[Sequence], of: int) -> list[Sequence]:
    return [sample for sample in samples if sample[0] == samples[of][0]]


def _totals(samples: list[Sequence]) -> list[float]:
    return [sum(rewards) for _, rewards in samples]


def _grpo(samples: list[Sequence], i: int) -> list[float]:
    totals = _totals(_group(samples, i))
    std = statistics.stdev(totals) if len(totals) > 1 else 0.0
    return [(sum(samples[i][1]) - statistics.fmean(totals)) / (std + 1e-6)] * len(samples[i][1])


def _dr_grpo(samples: list[Sequence], i: int) -> list[float]:
    return [sum(samples[i][1]) - statistics.fmean(_totals(_group(samples, i)))] * len(samples[i][1])


def _rloo(samples: list[Sequence], i: int) -> list[float]:
    others = [sum(r) for j, (group, r) in enumerate(samples) if j != i and group == samples[i][0]]
    return [sum(samples[i][1]) - statistics.fmean(others) if others else 0.0] * len(samples[i][1])


def _opo(samples: list[Sequence], i: int) -> list[float]:
    members = _group(samples, i)
    baseline = sum(len(r) * sum(r) for _, r in members) / sum(len(r) for _, r in members)
    return [sum(samples[i][1]) - baseline] * len(samples[i][1])


def _to_go(rewards: list[float]) -> list[float]:
    return [sum(GAMMA ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def _remax(samples: list[Sequence], i: int) -> list[float]:
    return [value - 0.5 * samples[i][0] for value in _to_go(samples[i][1])]


def _whitened(samples: list[Sequence], i: int, of: Callable[[int], list[float]]) -> list[float]:
    every = [value for j in range(len(samples)) for value in of(j)]
    std = statistics.stdev(every) if len(every) > 1 else 0.0
    return [(value - statistics.fmean(every)) / (std + 1e-8) for value in of(i)]


def _reinforce(samples: list[Sequence], i: int) -> list[float]:
    return _whitened(samples, i, lambda j: _to_go(samples[j][1]))


def _reinforce_baseline(samples: list[Sequence], i: int) -> list[float]:
    return _whitened(samples, i, lambda j: _dr_grpo(samples, j))


SLOW = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "opo": _opo,
    "reinforce_plus_plus": _reinforce,
    "reinforce_plus_plus_baseline": _reinforce_baseline,
    "remax": _remax,
}


def test_every_estimator_has_a_slow_version() -> None:
    assert SLOW.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", SLOW)
@settings(max_examples=25, deadline=None)
@given(samples=SAMPLES)
def test_n5_estimators_equal_a_float64_loop(name: str, samples: list[Sequence]) -> None:
    """N5: every token of every response; prompt tokens get 0."""
    found = ADVANTAGES[name](_inputs(samples))
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    wanted = [value for i in range(len(samples)) for value in [0.0, *SLOW[name](samples, i)]]
    assert found.tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("remax", "reinforce_plus_plus")])
def test_n5_groups_whose_scores_are_equal_get_exactly_zero(name: str) -> None:
    """N5: zero, not NaN, and not what is left of rounding: 0.1 and lengths of 3, 7 and 5 do not divide evenly."""
    samples: list[Sequence] = [(g, [0.0] * n + [0.1]) for g in range(2) for n in (2, 6, 4)]
    assert ADVANTAGES[name](_inputs(samples)).tolist() == [0.0] * sum(len(r) + 1 for _, r in samples)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("remax", "reinforce_plus_plus")])
def test_n5_equal_scores_that_float64_rounds_get_exactly_zero(name: str) -> None:
    """N5: a score with a small KL penalty in it fills all 53 bits, so that sums and quotients of equal scores round."""
    samples: list[Sequence] = [(0, [0.0] * n + [1e-9, 0.1]) for n in (1, 5, 3)]
    total = float(_inputs(samples).returns()[0])
    assert (3 * total + 7 * total + 5 * total) / 15 != total, "these numbers do not round"
    assert ADVANTAGES[name](_inputs(samples)).tolist() == [0.0] * sum(len(r) + 1 for _, r in samples)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@settings(max_examples=25, deadline=None)
@given(samples=SAMPLES, dropped=st.sets(st.integers(0, 3)))
def test_n5_whitening_is_over_the_groups_that_are_kept(name: str, samples: list[Sequence], dropped: set[int]) -> None:
    """N5: kept sequences get what they would get without the others; those get 0."""
    alone = [sample for sample in samples if sample[0] not in dropped]
    kept = torch.tensor([group not in dropped for group, _ in samples])
    found = ADVANTAGES[name](replace(_inputs(samples), kept=kept)).tolist()
    of_kept = iter([value for i in range(len(alone)) for value in [0.0, *SLOW[name](alone, i)]])
    wanted = [0.0 if group in dropped else next(of_kept) for group, r in samples for _ in [0.0, *r]]
    assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)


def test_flat_groups_that_leave_the_update_do_not_change_a_right_answers_advantage() -> None:
    """Six flat groups beside one of a right and three wrong answers: 1.5 as alone, not 4.5."""
    samples: list[Sequence] = [(0, [1.0]), (0, [0.0]), (0, [0.0]), (0, [0.0])] + [(g, [0.0]) for g in range(1, 7)] * 4
    kept = torch.tensor([group == 0 for group, _ in samples])
    name = "reinforce_plus_plus_baseline"
    assert float(ADVANTAGES[name](replace(_inputs(samples), kept=kept))[1]) == pytest.approx(1.5)
    assert float(ADVANTAGES[name](_inputs(samples))[1]) == pytest.approx(4.5)


def test_grpo_without_the_deviation_is_dr_grpo() -> None:
    inputs = _inputs([(0, [1.0, 0.0]), (0, [0.0]), (0, [0.25]), (1, [1.0]), (1, [0.0, 0.0])])
    found = ADVANTAGES["grpo"](replace(inputs, norm_by_std=False))
    assert torch.equal(found, ADVANTAGES["dr_grpo"](inputs))


def test_overlong_penalty_grows_over_the_buffer() -> None:
    lens = torch.tensor([10, 80, 81, 90, 100])
    assert overlong_penalty(lens, 100, 20, 1.0).tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0])
    assert overlong_penalty(lens, 100, 20, 0.5).tolist() == pytest.approx([0.0, 0.0, -0.025, -0.25, -0.5])


def test_groups_that_differ_are_found() -> None:
    assert differing_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), 2) == [False, True, False]
