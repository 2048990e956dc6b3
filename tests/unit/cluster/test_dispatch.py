"""Dispatch: which rank gets what, and whose results come back. Pure."""

from __future__ import annotations

import pytest

from megatron_rl.cluster.dispatch import (
    Collect,
    Dispatch,
    RankGrid,
    Split,
    collected_ranks,
    dispatch,
    dispatch_of,
    gather,
    scatter,
)
from megatron_rl.errors import ClusterError

# dp=2, tp=2, rank = 2 * dp + tp; engines of one rank each.
DP2_TP2 = RankGrid(4, (0, 0, 1, 1), (True, False, True, False), (0, 1, 2, 3), (True,) * 4)
# pp=2, dp=2 (pp outermost): the last stage's ranks head their data-parallel rank; one engine of all four.
PP2_DP2 = RankGrid(4, (0, 1, 0, 1), (False, False, True, True), (0, 0, 0, 0), (True, False, False, False))
# Three engines of two ranks whose numbers do not follow the ranks'.
ENGINES = RankGrid(6, (0,) * 6, (True, *(False,) * 5), (2, 2, 0, 0, 1, 1), (True, False, False, True, True, False))


class Worker:
    @dispatch(split=Split.SPLIT_DP)
    def logprobs(self, batch: object) -> None: ...

    @dispatch(split=Split.SPLIT_DP, collect=Collect.RANK0)
    def update(self, batch: object) -> None: ...

    @dispatch()
    def barrier(self) -> None: ...

    def helper(self) -> None: ...


def run(mode: Dispatch, grid: RankGrid, *args, **kwargs):
    """Each rank returns (rank, its first argument)."""
    calls = scatter(mode, args, kwargs, grid)
    return gather(mode, [None if call is None else (r, call[0][0]) for r, call in enumerate(calls)], grid)


def test_all_sends_the_same_arguments_everywhere():
    mode = Dispatch(Split.ALL, Collect.ALL)
    calls = scatter(mode, (1,), {"k": 2}, DP2_TP2)
    assert calls == [((1,), {"k": 2})] * 4
    assert len({id(call) for call in calls}) == 1, "one object, so that a backend ships it once"
    assert run(mode, DP2_TP2, "x") == [(0, "x"), (1, "x"), (2, "x"), (3, "x")]
    assert run(Dispatch(Split.ALL, Collect.RANK0), DP2_TP2, "x") == (0, "x")


def test_split_dp_gives_entry_d_to_every_rank_of_d_and_collects_from_the_heads():
    mode = Dispatch(Split.SPLIT_DP, Collect.DP)
    calls = scatter(mode, (["a", "b"], 7), {"k": 1}, DP2_TP2)
    assert calls == [(("a", 7), {"k": 1})] * 2 + [(("b", 7), {"k": 1})] * 2
    assert calls[0] is calls[1] and calls[1] is not calls[2]
    assert run(mode, DP2_TP2, ["a", "b"]) == [(0, "a"), (2, "b")]
    assert run(mode, PP2_DP2, ["a", "b"]) == [(2, "a"), (3, "b")], "from the last pipeline stage"


def test_split_engine_collects_in_the_order_of_engines_not_of_ranks():
    mode = Dispatch(Split.SPLIT_ENGINE, Collect.ENGINE)
    assert run(mode, ENGINES, ["e0", "e1", "e2"]) == [(3, "e0"), (4, "e1"), (0, "e2")]
    assert run(mode, DP2_TP2, list("wxyz")) == [(0, "w"), (1, "x"), (2, "y"), (3, "z")]


def test_rank0_calls_nobody_else():
    mode = Dispatch(Split.RANK0, Collect.RANK0)
    assert scatter(mode, (1,), {}, DP2_TP2) == [((1,), {}), None, None, None]
    assert run(mode, DP2_TP2, 1) == (0, 1)


@pytest.mark.parametrize("grid", [DP2_TP2, PP2_DP2, ENGINES, RankGrid.flat(3)])
@pytest.mark.parametrize("collect", list(Collect))
def test_gather_looks_only_at_collected_ranks(grid, collect):
    mode = Dispatch(Split.ALL, collect)
    ranks = collected_ranks(mode, grid)
    full = gather(mode, list(range(grid.world)), grid)
    assert full == (list(ranks) if collect is not Collect.RANK0 else 0)
    assert gather(mode, [r if r in ranks else None for r in range(grid.world)], grid) == full


def test_a_split_argument_of_the_wrong_length_is_refused_with_both_numbers():
    mode = Dispatch(Split.SPLIT_DP, Collect.DP)
    with pytest.raises(ClusterError, match=r"one entry per data-parallel rank \(2\), but got 3 entries"):
        scatter(mode, ([1, 2, 3],), {}, DP2_TP2)
    with pytest.raises(ClusterError, match=r"one entry per rollout engine \(3\), but got no list"):
        scatter(Dispatch(Split.SPLIT_ENGINE, Collect.ENGINE), ("abc",), {}, ENGINES)
    with pytest.raises(ClusterError, match="but got no list"):
        scatter(mode, (), {"batch": [1, 2]}, DP2_TP2)


def test_methods_declare_their_mode_and_others_are_refused_by_name():
    assert dispatch_of(Worker, "logprobs") == Dispatch(Split.SPLIT_DP, Collect.DP)
    assert dispatch_of(Worker, "update") == Dispatch(Split.SPLIT_DP, Collect.RANK0)
    assert dispatch_of(Worker, "barrier") == Dispatch(Split.ALL, Collect.ALL)
    with pytest.raises(ClusterError, match=r"Worker\.helper is not declared"):
        dispatch_of(Worker, "helper")
    with pytest.raises(AttributeError, match="no method 'updat'; declared: barrier, logprobs, update"):
        dispatch_of(Worker, "updat")


def test_a_grid_without_one_head_a_part_is_a_fault_of_ours():
    with pytest.raises(AssertionError):
        RankGrid(2, (0, 1), (True, False), (0, 1), (True, True))
    with pytest.raises(AssertionError):
        RankGrid(2, (0, 0), (True, True), (0, 1), (True, True))
