"""Plans of batches: nothing lost, nothing doubled, balanced, within the caps."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data import batching
from megatron_rl.data.batching import (
    MicroBatches,
    assign_ranks,
    balanced,
    longest_first,
    plan_batches,
    sequence_cost,
)
from megatron_rl.errors import DataError


@settings(max_examples=150, deadline=None)
@given(
    lens=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    dp=st.integers(1, 5),
    minis=st.integers(1, 3),
    max_seqs=st.one_of(st.none(), st.integers(1, 5)),
    multiple=st.integers(1, 3),
    packed=st.booleans(),
    cells=st.sampled_from([0, 1 << 15]),
)
def test_every_sequence_is_planned_exactly_once(
    lens: list[int], dp: int, minis: int, max_seqs: int | None, multiple: int, packed: bool, cells: int
) -> None:
    """By either method of balancing (cells 0 leaves the quicker one), within the caps, padded or packed."""
    mini_of = [i * minis // len(lens) for i in range(len(lens))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_DIFFERENCING_CELLS", cells)
        plan = plan_batches(lens, mini_of, dp=dp, max_tokens=100, max_seqs=max_seqs, multiple=multiple, packed=packed)
    seen = [s for mini in plan.minis for rank in mini for micro in rank for s in micro]
    assert sorted(seen) == list(range(len(lens)))
    for number, mini in enumerate(plan.minis):
        assert len(mini) == dp and len({len(rank) for rank in mini}) == 1
        assert len(mini[0]) % multiple == 0
        for micro in (micro for rank in mini for micro in rank):
            longest = max((lens[s] for s in micro), default=0)
            assert (sum(lens[s] for s in micro) if packed else len(micro) * longest) <= 100
            assert len(micro) <= (max_seqs or len(lens))
            assert all(mini_of[s] == number for s in micro)


def test_a_sequence_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(DataError, match=r"70 tokens passes actor\.max_tokens_per_gpu 64"):
        plan_batches([3, 70], [0, 0], dp=1, max_tokens=64)


def test_a_thousand_random_batches_are_balanced_within_two_percent_over_eight_ranks() -> None:
    """Long-tailed lengths. Where one sequence alone costs more than that, its rank has nothing else to do and no plan
    can be better: max / mean is then the cost of that sequence over the mean.
    """
    generator = random.Random(1)
    alone = 0
    for _ in range(1000):
        lens = [min(8192, int(generator.lognormvariate(6, 1)) + 1) for _ in range(128)]
        costs = [sequence_cost(length) for length in lens]
        longest = max(costs) * 8 / sum(costs)
        alone += longest > 1.02
        # One micro-batch a rank: how a rank cuts its share up does not change the share.
        assert _imbalance(lens, 8, max_tokens=1 << 20) <= max(1.02, longest + 1e-9)
    assert 0 < alone < 100, "both cases are there, and the second is rare"


def test_a_plan_over_a_thousand_ranks_is_quick_and_balanced() -> None:
    """Karmarkar-Karp would hold 20 million parts there."""
    generator = random.Random(2)
    lens = [min(8192, int(generator.lognormvariate(6, 1)) + 1) for _ in range(20_000)]
    start = time.process_time()
    assert _imbalance(lens, 1024) < 1.02
    assert time.process_time() - start < 10


def _imbalance(lens: list[int], ranks: int, max_tokens: int = 16384) -> float:
    plan = plan_batches(lens, [0] * len(lens), dp=ranks, max_tokens=max_tokens)
    loads = [sum(sequence_cost(lens[s]) for micro in rank for s in micro) for rank in plan.minis[0]]
    return max(loads) * ranks / sum(loads)


def _plan_of_each_mini_batch_alone(lens: list[int], mini_of: list[int], dp: int) -> list[list[list[int]]]:
    """[mini][dp] sequence numbers, each mini-batch balanced by itself."""
    found = []
    for mini in range(max(mini_of) + 1):
        members = [s for s, number in enumerate(mini_of) if number == mini]
        shares = balanced([sequence_cost(lens[s]) for s in members], dp)
        found.append([[members[i] for i in share] for share in shares])
    return found


def _sequences(ranks: tuple[MicroBatches, ...]) -> list[list[int]]:
    return [sorted(s for micro in rank for s in micro) for rank in ranks]


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 64), min_size=24, max_size=24),
    dp=st.integers(1, 5),
    sizes=st.tuples(st.sampled_from([4, 6, 8, 12, 24]), st.sampled_from([4, 6, 8, 12, 24])),
)
def test_roles_keep_each_sequence_on_one_rank(lens: list[int], dp: int, sizes: tuple[int, int]) -> None:
    """Actor and critic with mini-batches of their own sizes; equal sizes are planned as if there were one role."""
    minis = [[s // size for s in range(24)] for size in sizes]
    rank_of = assign_ranks(lens, minis, dp)
    plans = [plan_batches(lens, mini_of, dp=dp, max_tokens=100, rank_of=rank_of) for mini_of in minis]
    for plan, mini_of in zip(plans, minis, strict=True):
        for number, ranks in enumerate(plan.minis):
            for d, members in enumerate(_sequences(ranks)):
                assert all(rank_of[s] == d and mini_of[s] == number for s in members)
        assert sorted(s for ranks in plan.minis for rank in _sequences(ranks) for s in rank) == list(range(24))
    finer = min(range(2), key=lambda role: sizes[role])
    if sizes[0] == sizes[1]:
        alone = _plan_of_each_mini_batch_alone(lens, minis[finer], dp)
        assert [_sequences(ranks) for ranks in plans[finer].minis] == alone
        assert plans[finer] == plan_batches(lens, minis[finer], dp=dp, max_tokens=100)


def test_a_mini_batch_made_of_several_shares_is_balanced() -> None:
    """The critic's mini-batch is four of the actor's: the heavier shares do not all go to rank 0 (1.10 if they do)."""
    generator = random.Random(3)
    lens = [min(8192, int(generator.lognormvariate(6, 1)) + 1) for _ in range(512)]
    rank_of = assign_ranks(lens, [[s // 32 for s in range(512)], [s // 128 for s in range(512)]], 4)
    for first in range(0, 512, 128):
        loads = [0.0] * 4
        for s in range(first, first + 128):
            loads[rank_of[s]] += sequence_cost(lens[s])
        assert max(loads) <= 1.08 * sum(loads) / 4


def test_longest_first_puts_each_item_once_and_heavy_lists_first() -> None:
    parts = longest_first([5, 1, 4, 2, 3, 3], 3)
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert [sum([5, 1, 4, 2, 3, 3][i] for i in part) for part in parts] == [6, 6, 6]
    assert longest_first([1.0], 3) == [[0], [], []] and longest_first([], 2) == [[], []]


def test_keep_thins_micro_batches_and_keeps_their_number() -> None:
    plan = plan_batches((3, 1, 4, 2), [0, 0, 0, 0], dp=2, max_tokens=5)
    kept = torch.tensor([True, False, False, True])
    thin = plan.keep(kept)
    assert sorted(s for mini in thin.minis for rank in mini for micro in rank for s in micro) == [0, 3]
    assert [[len(rank) for rank in mini] for mini in thin.minis] == [
        [len(rank) for rank in mini] for mini in plan.minis
    ]
