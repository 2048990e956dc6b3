from __future__ import annotations

import time

import pytest

from megatron_rl.observe.start_times import StartTimes, start_line, start_metrics, with_ranks


def test_phases_add_up_to_the_time_that_passed_and_an_inner_one_is_taken_off_the_outer_one() -> None:
    times, begun = StartTimes(), time.perf_counter()
    with times.phase("outer"):
        time.sleep(0.02)
        with times.phase("inner"):
            time.sleep(0.05)
            with pytest.raises(ValueError, match="stops"), times.phase("outer"):
                raise ValueError("stops")
    with times.phase("inner"):
        time.sleep(0.03)
    whole = time.perf_counter() - begun
    assert list(times.seconds) == ["outer", "inner"]
    assert times.seconds["inner"] >= 0.08 and 0.02 <= times.seconds["outer"] < 0.08
    assert sum(times.seconds.values()) == pytest.approx(whole, abs=0.01)


def test_the_wait_for_workers_is_divided_by_the_slowest_rank() -> None:
    controller = {"data": 1.0, "workers": 30.0, "first sync": 2.0}
    ranks = [{"imports": 9.0, "engine": 10.0}, {"imports": 8.0, "engine": 18.0}]
    seconds = with_ranks(controller, ranks)
    assert list(seconds.items()) == [
        ("data", 1.0), ("processes", 4.0), ("imports", 8.0), ("engine", 18.0), ("first sync", 2.0),
    ]  # fmt: skip
    assert sum(seconds.values()) == sum(controller.values())
    line = "start: 33.0 s = data 1.0, processes 4.0, imports 8.0, engine 18.0, first sync 2.0"
    assert start_line(seconds | {"rewards": 0.01}) == line
    assert start_metrics(seconds)["perf/start_first_sync_s"] == 2.0 and start_metrics(seconds)["perf/start_s"] == 33.0
