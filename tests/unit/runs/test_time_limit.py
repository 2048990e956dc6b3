"""trainer.max_time: a run saves and ends before it, and leaves room for that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.cluster import stop
from megatron_rl.errors import ConfigError
from megatron_rl.observe.sinks import read_metrics
from megatron_rl.runs import session
from megatron_rl.runs.time_limit import TimeLimit, process_age_s
from tests.unit.runs.test_resume import Trained, config, outcome, train


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "plot_curves", lambda *args: None)
        yield


def test_it_is_over_once_a_step_and_both_saves_would_not_fit() -> None:
    age = [0.0]
    limit = TimeLimit("1:00:00", lambda: age[0])
    assert not limit.is_over() and limit.room_s == 60.0, "nothing is measured yet"
    limit.note_step(100.0)
    limit.note_step(60.0)
    limit.note_save("checkpoint", 200.0)
    limit.note_save("model", 40.0)
    limit.note_save("checkpoint", 100.0)
    assert limit.room_s == 1.5 * 240.0
    age[0] = 3600.0 - 360.0 - 100.0 - 1.0
    assert not limit.is_over()
    age[0] += 1.0
    assert limit.is_over()


def test_without_a_limit_it_never_is() -> None:
    limit = TimeLimit(None, lambda: 1e9)
    limit.note_step(1e9)
    assert not limit.is_over()
    assert TimeLimit("5:00", lambda: 0.0).room_s == 30.0, "a short limit is not taken up by the room for a first save"


def test_the_age_is_that_of_the_process_and_not_of_the_run() -> None:
    first = process_age_s()
    time.sleep(0.1)
    assert first > 0.2 and 0.05 < process_age_s() - first < 5.0


def test_a_run_ends_before_its_limit_with_a_checkpoint_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age = [0.0]
    monkeypatch.setattr(session, "TimeLimit", lambda text: TimeLimit(text, lambda: age[0]))

    def pass_time(place: str) -> None:
        age[0] += 40.0 if place.startswith("take") else 0.0

    # Nobody asked for checkpoints while it goes on.
    cfg = config(tmp_path, "trainer.max_time=2:30", "trainer.save_freq=-1")
    with pytest.raises(
        stop.Stopped, match=r"ended by trainer.max_time 2:30 after step 4: its checkpoint is .*000004"
    ) as caught:
        train(cfg, at=pass_time)
    assert stop.exit_code(None, caught.value.can_go_on) == 75
    age[0] = 0.0
    assert train(cfg).log == ["learn 5", "publish 5", "learn 6", "publish 6"]
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl")] == list(range(7))
    other = tmp_path / "whole"
    other.mkdir()
    train(config(other, "trainer.save_freq=-1"))
    assert outcome(tmp_path / "runs" / "a")["rows"] == outcome(other / "runs" / "a")["rows"]


def test_a_limit_that_no_step_fits_into_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TimeLimit", lambda text: TimeLimit(text, lambda: 1000.0))
    with pytest.raises(ConfigError, match=r"trainer.max_time: '2:30' -- is over before one more step is complete"):
        train(config(tmp_path, "trainer.max_time=2:30"))


@pytest.mark.parametrize("freq", ["0", "1"])
def test_a_run_that_is_stopped_before_it_did_a_further_step_still_goes_on(tmp_path: Path, freq: str) -> None:
    """75 for a job manager, which may stop a run while its workers start."""
    train(config(tmp_path, "trainer.total_training_steps=4"))

    def interrupt(place: str) -> None:
        if place == "take 5":
            raise stop.Stopped

    cfg = config(tmp_path, f"checkpoint.freq={freq}")
    with pytest.raises(
        stop.Stopped, match=r"before step 5 was complete: the newest checkpoint is still .*000004"
    ) as caught:
        train(cfg, at=interrupt)
    assert caught.value.can_go_on
    assert train(cfg).log[0] == "learn 5"


def test_a_stop_that_could_not_be_saved_does_not_ask_for_more(tmp_path: Path) -> None:
    def interrupt(place: str) -> None:
        if place == "take 3":
            raise stop.Stopped

    cfg = config(tmp_path, "checkpoint.freq=0", "trainer.save_freq=-1")
    with pytest.raises(
        stop.Stopped, match=r"checkpoint.freq is 0, so no checkpoint is kept; its weights are in"
    ) as caught:
        train(cfg, at=interrupt)
    assert not caught.value.can_go_on


def test_a_stop_in_the_middle_of_sampling_keeps_the_state_of_the_step_before(tmp_path: Path) -> None:
    """The data has moved on by then: what is saved is where it was after the last whole step."""

    def interrupt(place: str) -> None:
        if place == "take 5":
            raise stop.Stopped

    cfg = config(tmp_path, "checkpoint.freq=100", "trainer.save_freq=-1")
    with pytest.raises(stop.Stopped, match="after step 4"):
        train(cfg, at=interrupt)
    last = train(cfg)
    other = tmp_path / "whole"
    other.mkdir()
    whole: Trained = train(config(other, "trainer.save_freq=-1"))
    assert last.weight == whole.weight
