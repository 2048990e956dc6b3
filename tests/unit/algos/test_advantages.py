"""Each estimator without a critic against a slow version: Python floats, one token at a time."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.estimators.base import Estimator, ScoredSequences, SequenceEstimator, TokenEstimator
from megatron_rl.algos.estimators.grpo import Grpo
from megatron_rl.algos.estimators.tokens import CreditTokens
from megatron_rl.algos.filters import differing_groups, overlong_penalty
from megatron_rl.algos.groups import sequence_sums, spread

Sequence = tuple[int, list[float]]
"""Group, and the reward of each response token; a prompt token comes before."""

REWARD = st.sampled_from([0.0, 0.0, 0.25, 1.0, -0.5])
SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.lists(REWARD, min_size=1, max_size=5)), min_size=1, max_size=16)
GAMMA = 0.9


@dataclass(frozen=True)
class Batch:
    """Samples as tensors; `credit` is the estimator's, spread over tokens."""

    token_rewards: torch.Tensor
    mask: torch.Tensor
    segments: torch.Tensor
    group_ids: torch.Tensor
    baselines: torch.Tensor

    def credit(self, estimator: Estimator, kept: torch.Tensor | None = None) -> torch.Tensor:
        """[T] float32."""
        count = len(self.group_ids)
        if isinstance(estimator, SequenceEstimator):
            returns, lens = (sequence_sums(column, self.segments, count) for column in (self.token_rewards, self.mask))
            found = estimator(ScoredSequences(returns, self.group_ids, lens, kept))
            assert found.dtype == torch.float64
            return spread(found, self.mask, self.segments)
        assert isinstance(estimator, TokenEstimator)
        greedy = self.baselines[self.group_ids]
        return estimator(CreditTokens(self.token_rewards, self.mask, self.segments, count, kept, greedy)).advantages


def _batch(samples: list[Sequence]) -> Batch:
    lengths = [len(rewards) + 1 for _, rewards in samples]
    ids = sorted({group for group, _ in samples})
    return Batch(
        token_rewards=torch.tensor([r for _, rewards in samples for r in [0.0, *rewards]]),
        mask=torch.tensor([trained for n in lengths for trained in [False] + [True] * (n - 1)]),
        segments=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        group_ids=torch.tensor([ids.index(group) for group, _ in samples]),
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
MADE: dict[str, Estimator] = {
    name: estimator(**({"gamma": GAMMA} if "gamma" in {field.name for field in fields(estimator)} else {}))
    for name, estimator in ESTIMATORS.items()
}
PER_SEQUENCE = [name for name, estimator in MADE.items() if isinstance(estimator, SequenceEstimator)]


def test_every_estimator_has_a_slow_version() -> None:
    assert SLOW.keys() | {"gae"} == ESTIMATORS.keys()


@pytest.mark.parametrize("name", SLOW)
@settings(max_examples=25, deadline=None)
@given(samples=SAMPLES)
def test_n5_estimators_equal_a_float64_loop(name: str, samples: list[Sequence]) -> None:
    """N5: every token of every response; prompt tokens get 0."""
    found = _batch(samples).credit(MADE[name])
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    wanted = [value for i in range(len(samples)) for value in [0.0, *SLOW[name](samples, i)]]
    assert found.tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_n5_groups_whose_scores_are_equal_get_exactly_zero(name: str) -> None:
    """N5: zero, not NaN, and not what is left of rounding: 0.1 and lengths of 3, 7 and 5 do not divide evenly."""
    samples: list[Sequence] = [(g, [0.0] * n + [0.1]) for g in range(2) for n in (2, 6, 4)]
    assert _batch(samples).credit(MADE[name]).tolist() == [0.0] * sum(len(r) + 1 for _, r in samples)


@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_n5_equal_scores_that_float64_rounds_get_exactly_zero(name: str) -> None:
    """N5: a score with a small KL penalty in it fills all 53 bits, so that sums and quotients of equal scores round."""
    samples: list[Sequence] = [(0, [0.0] * n + [1e-9, 0.1]) for n in (1, 5, 3)]
    batch = _batch(samples)
    total = float(sequence_sums(batch.token_rewards, batch.segments, len(samples))[0])
    assert (3 * total + 7 * total + 5 * total) / 15 != total, "these numbers do not round"
    assert _batch(samples).credit(MADE[name]).tolist() == [0.0] * sum(len(r) + 1 for _, r in samples)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@settings(max_examples=25, deadline=None)
@given(samples=SAMPLES, dropped=st.sets(st.integers(0, 3)))
def test_n5_whitening_is_over_the_groups_that_are_kept(name: str, samples: list[Sequence], dropped: set[int]) -> None:
    """N5: kept sequences get what they would get without the others; those get 0."""
    alone = [sample for sample in samples if sample[0] not in dropped]
    kept = torch.tensor([group not in dropped for group, _ in samples])
    found = _batch(samples).credit(MADE[name], kept).tolist()
    of_kept = iter([value for i in range(len(alone)) for value in [0.0, *SLOW[name](alone, i)]])
    wanted = [0.0 if group in dropped else next(of_kept) for group, r in samples for _ in [0.0, *r]]
    assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)


def test_flat_groups_that_leave_the_update_do_not_change_a_right_answers_advantage() -> None:
    """Six flat groups beside one of a right and three wrong answers: 1.5 as alone, not 4.5."""
    samples: list[Sequence] = [(0, [1.0]), (0, [0.0]), (0, [0.0]), (0, [0.0])] + [(g, [0.0]) for g in range(1, 7)] * 4
    kept = torch.tensor([group == 0 for group, _ in samples])
    name = "reinforce_plus_plus_baseline"
    assert float(_batch(samples).credit(MADE[name], kept)[1]) == pytest.approx(1.5)
    assert float(_batch(samples).credit(MADE[name])[1]) == pytest.approx(4.5)


def test_grpo_without_the_deviation_is_dr_grpo() -> None:
    batch = _batch([(0, [1.0, 0.0]), (0, [0.0]), (0, [0.25]), (1, [1.0]), (1, [0.0, 0.0])])
    assert torch.equal(batch.credit(Grpo(norm_by_std=False)), batch.credit(ESTIMATORS["dr_grpo"]()))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_two_ranks_whiten_as_one_does(name: str) -> None:
    """Each rank has some of the sequences, one has none; sums go over all three."""
    samples: list[Sequence] = [(0, [1.0, 0.0]), (0, [0.5]), (1, [0.25, 0.0, 1.0]), (1, [0.0])]
    whole, estimator = _batch(samples), MADE[name]
    assert isinstance(estimator, TokenEstimator)
    parts = [_batch(samples[:3]), _batch(samples[3:]), _batch(samples[:1])]
    nobody = torch.zeros(1, dtype=torch.bool)
    tokens = [
        CreditTokens(b.token_rewards, b.mask, b.segments, len(b.group_ids), kept, values=torch.zeros(len(b.mask)))
        for b, kept in zip([*parts, whole], [None, None, nobody, None], strict=True)
    ]
    alone = estimator(tokens[-1]).advantages
    barrier, sums = threading.Barrier(3), [torch.zeros(0)] * 3

    def rank(number: int) -> torch.Tensor:
        def add_up(own: torch.Tensor) -> torch.Tensor:
            sums[number] = own
            barrier.wait(timeout=30)
            total = torch.stack(sums).sum(0)
            barrier.wait(timeout=30)
            return total

        return estimator(replace(tokens[number], add_up=add_up)).advantages

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(rank, range(3))
    assert torch.cat([first, second]).tolist() == pytest.approx(alone.tolist(), rel=1e-6)
    assert not third.any()


def test_an_estimator_says_what_its_tokens_lack() -> None:
    batch = _batch([(0, [1.0])])
    tokens = CreditTokens(batch.token_rewards, batch.mask, batch.segments, 1)
    for name, lacking in (("gae", "a critic's values"), ("remax", "the scores of greedy responses")):
        estimator = MADE[name]
        assert isinstance(estimator, TokenEstimator)
        with pytest.raises(ValueError, match=lacking):
            estimator(tokens)


def test_overlong_penalty_grows_over_the_buffer() -> None:
    lens = torch.tensor([10, 80, 81, 90, 100])
    assert overlong_penalty(lens, 100, 20, 1.0).tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0])
    assert overlong_penalty(lens, 100, 20, 0.5).tolist() == pytest.approx([0.0, 0.0, -0.025, -0.25, -0.5])


def test_groups_that_differ_are_found() -> None:
    assert differing_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), 2) == [False, True, False]
