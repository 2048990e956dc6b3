"""Dispatch: which rank gets what, and whose results come back. Pure."""

from __future__ import annotations

import pytest

from megatron_rl.cluster.dispatch import RankGrid, Replicas, call_by_replica, call_for_all, method_path
from megatron_rl.errors import ClusterError

EVERY = Replicas((0, 1, 2, 3), (True,) * 4)
# dp=2, tp=2, rank = 2 * dp + tp; engines of one rank each.
DP2_TP2 = RankGrid(4, Replicas((0, 0, 1, 1), (True, False, True, False)), EVERY)
# pp=2, dp=2 (pp outermost): the last stage's ranks head their replica.
PP2_DP2 = Replicas((0, 1, 0, 1), (False, False, True, True))
# Three engines of two ranks whose numbers do not follow the ranks'.
ENGINES = Replicas((2, 2, 0, 0, 1, 1), (True, False, False, True, True, False))


class Part:
    def step(self) -> None: ...


class Worker:
    part: Part
    count: int

    def step(self) -> None: ...

    def close(self) -> None: ...


class Child(Worker):
    def close(self) -> None: ...


def run(replicas: Replicas, *entries: object) -> list[tuple[int, object]]:
    """Each rank returns (rank, its first argument); what the heads returned."""
    calls = call_by_replica(list(entries), (), {}, replicas, "replica")
    return [(rank, calls[rank][0][0]) for rank in replicas.heads]


def test_all_sends_the_same_arguments_everywhere():
    calls = call_for_all((1,), {"k": 2}, DP2_TP2)
    assert calls == [((1,), {"k": 2})] * 4
    assert len({id(call) for call in calls}) == 1, "one object, so that a backend ships it once"


def test_entry_d_goes_to_every_rank_of_replica_d_and_the_heads_answer():
    calls = call_by_replica(["a", "b"], (7,), {"k": 1}, DP2_TP2.dp, "replica")
    assert calls == [(("a", 7), {"k": 1})] * 2 + [(("b", 7), {"k": 1})] * 2
    assert calls[0] is calls[1] and calls[1] is not calls[2]
    assert run(DP2_TP2.dp, "a", "b") == [(0, "a"), (2, "b")]
    assert run(PP2_DP2, "a", "b") == [(2, "a"), (3, "b")], "from the last pipeline stage"


def test_heads_are_in_the_order_of_replicas_not_of_ranks():
    assert run(ENGINES, "e0", "e1", "e2") == [(3, "e0"), (4, "e1"), (0, "e2")]
    assert run(EVERY, *"wxyz") == [(0, "w"), (1, "x"), (2, "y"), (3, "z")]


def test_counts_of_a_grid():
    assert (DP2_TP2.num_dp, DP2_TP2.num_engines) == (2, 4)
    flat = RankGrid.flat(3)
    assert (flat.num_dp, flat.num_engines, flat.engines) == (3, 0, None)


def test_a_wrong_number_of_entries_is_refused_with_both_numbers():
    with pytest.raises(ClusterError, match=r"one entry per engine \(3\), but got 2 entries"):
        call_by_replica([1, 2], (), {}, ENGINES, "engine")
    with pytest.raises(ClusterError, match="but got a str"):
        call_by_replica("abc", (), {}, ENGINES, "engine")


def test_a_method_is_found_on_the_worker_or_on_a_component_of_it():
    assert method_path(Worker, Worker.step) == "step"
    assert method_path(Worker, Part.step) == "part.step"
    assert method_path(Child, Worker.step) == "step"
    assert method_path(Child, Part.step) == "part.step"
    with pytest.raises(ClusterError, match=r"Child\.close is no method .* made of: Worker, Part"):
        method_path(Worker, Child.close)


def test_a_grid_without_one_head_a_replica_is_a_fault_of_ours():
    with pytest.raises(AssertionError):
        Replicas((0, 1), (True, False))
    with pytest.raises(AssertionError):
        Replicas((0, 0), (True, True))
    with pytest.raises(AssertionError):
        RankGrid(3, Replicas((0, 1), (True, True)))
