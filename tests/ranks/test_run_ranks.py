"""The helper that every multi-rank test rests on: it returns, re-raises and gives up as it says (R7)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError, Fault
from tests.helpers.run_ranks import RankFailed, RanksTimedOut, run_ranks


def _sum_of_ranks(rank: int, world: int, scale: float) -> tuple[int, int, torch.Tensor]:
    value = torch.tensor([scale * rank, 1.0])
    dist.all_reduce(value)
    return rank, world, value


def _raise_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ConfigError([Fault("actor.tp", 3, "does not divide the heads", "use 2")])
    dist.barrier()


def _raise_unpicklable(rank: int, world: int) -> None:
    class Local(Exception):
        pass

    raise Local("only here")


def _die_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(30)


def _abort_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        print("why it aborts", file=sys.stderr, flush=True)
        os.abort()
    time.sleep(30)


def _lose_a_gloo_thread_at_first(rank: int, world: int, marker: str) -> int:
    if rank == 1 and not os.path.exists(marker):
        with open(marker, "w"):
            print("terminate called after throwing gloo::EnforceNotMet", file=sys.stderr, flush=True)
        os.abort()
    dist.barrier()
    return rank


def _hang_on_rank_one(rank: int, world: int) -> int:
    if rank == 1:
        _sleep_for_ever()
    return rank


def _sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def _threads_and_pid(rank: int, world: int) -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


def _unpicklable_result(rank: int, world: int) -> Any:
    return lambda: rank


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_back_in_rank_order(n: int):
    results = run_ranks(n, _sum_of_ranks, 2.0)
    total = torch.tensor([2.0 * sum(range(n)), float(n)])
    assert [(rank, world) for rank, world, _ in results] == [(rank, n) for rank in range(n)]
    assert all(torch.equal(value, total) for _, _, value in results)


def test_an_exception_keeps_its_type_and_names_its_rank():
    with pytest.raises(ConfigError, match=r"actor\.tp: 3") as caught:
        run_ranks(2, _raise_on_rank_one)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 of 2" in notes
    assert "in _raise_on_rank_one" in notes


def test_an_exception_that_cannot_travel_arrives_as_text():
    with pytest.raises(RankFailed, match="only here"):
        run_ranks(1, _raise_unpicklable)


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises((TypeError, AttributeError, RankFailed), match="pickle"):
        run_ranks(1, _unpicklable_result)


def test_a_rank_that_dies_is_named_at_once():
    run_ranks(1, _threads_and_pid)
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2: died with exit code 7"):
        run_ranks(2, _die_on_rank_one)
    assert time.monotonic() - started < 15


def test_a_crash_shows_what_the_rank_wrote_and_where_it_stood():
    with pytest.raises(RankFailed, match="rank 1 of 2: died with exit code -6") as caught:
        run_ranks(2, _abort_on_rank_one)
    assert "why it aborts" in str(caught.value)
    assert "in _abort_on_rank_one" in str(caught.value)


def test_a_thread_of_gloo_that_dies_costs_one_more_attempt(tmp_path: Path):
    with pytest.warns(UserWarning, match="runs once more: rank 1 of 2: died with exit code -6"):
        assert run_ranks(2, _lose_a_gloo_thread_at_first, str(tmp_path / "marker")) == [0, 1]


def test_the_deadline_names_the_ranks_and_where_they_stood():
    with pytest.raises(RanksTimedOut, match=r"ranks \[1\] of 2 did not finish within 1\.5 s") as caught:
        run_ranks(2, _hang_on_rank_one, timeout=1.5)
    assert "in _sleep_for_ever" in str(caught.value)


def test_a_function_that_no_other_process_finds_is_refused():
    with pytest.raises(TypeError, match="must be picklable"):
        run_ranks(1, lambda rank, world: None)


def test_ranks_take_one_thread_each_and_are_gone_afterwards():
    for threads, pid in run_ranks(2, _threads_and_pid):
        assert threads == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
