"""Which errors a restart cures, how long it waits, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_rl import errors
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import (
    BrokenCheckpoint,
    ClusterError,
    DataError,
    DeviceError,
    MegatronRLError,
    NodeLost,
    P2PError,
    RankDied,
    RankHung,
)
from megatron_rl.runs import session
from megatron_rl.runs.checkpoints import Checkpoint
from megatron_rl.runs.restarts import CURABLE, LONGEST_WAIT_S, Restarts, back_off_s, can_cure
from tests.helpers.config import load
from tests.unit.config.test_folders import Steps


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def made(max_restarts: int, nodes_are_there=lambda: None) -> tuple[Restarts, Clock, list[str]]:
    clock, said = Clock(), list[str]()
    cfg = TrainerConfig(max_restarts=max_restarts, restart_wait_s=10.0)
    return Restarts(cfg, said.append, nodes_are_there, clock.sleep, clock), clock, said


def test_what_would_come_again_is_not_tried_again():
    every = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, MegatronRLError)]
    assert {one for one in every if issubclass(one, CURABLE)} == {RankDied, RankHung, NodeLost, DeviceError, P2PError}
    assert not any(map(can_cure, (ValueError(), AssertionError(), OSError(), KeyboardInterrupt(), MemoryError())))


def test_waits_double_up_to_five_minutes():
    assert [back_off_s(10.0, number) for number in range(1, 8)] == [
        10,
        20,
        40,
        80,
        160,
        300,
        300,
    ] and LONGEST_WAIT_S == 300
    assert back_off_s(0.0, 3) == 0.0


def test_a_restart_is_one_line_with_its_cause_and_one_with_the_seconds_that_it_took():
    restarts, clock, said = made(2)
    restarts.step_done(6)
    clock.now += 3.0
    restarts.take(RankDied("Worker.step: rank 1 died (node0, process 12)\nrank 0 failed"))
    restarts.wait()
    clock.now += 20.0
    restarts.step_done(7)
    restarts.step_done(8)
    assert said == [
        "restart 1 of 2 in 10 s; the cause: RankDied: Worker.step: rank 1 died (node0, process 12)",
        "restart 1 of 2: step 7 is complete, 30.0 s after the fault was named and 33.0 s after the last complete step",
    ]
    assert clock.slept == [10.0] and restarts.count == 1


def test_restarts_are_used_up_and_none_is_made_by_default():
    restarts, clock, _ = made(2)
    for number in (1, 2):
        restarts.take(NodeLost("gone"))
        restarts.wait()
        assert restarts.count == number
    with pytest.raises(NodeLost) as caught:
        restarts.take(NodeLost("gone"))
    assert caught.value.__notes__ == ["trainer.max_restarts: 2 restarts are used up"] and clock.slept == [10.0, 20.0]
    with pytest.raises(RankDied):
        made(0)[0].take(RankDied("x"))
    with pytest.raises(DataError):
        made(9)[0].take(DataError("x"))


def test_resources_that_are_missing_are_waited_for_in_a_restart_alone():
    restarts, _, _ = made(3)
    with pytest.raises(ClusterError):
        restarts.take(ClusterError("no room"))
    restarts.take(NodeLost("gone"))
    restarts.take(ClusterError("no room yet: the lost node still counts"))
    restarts.step_done(4)
    with pytest.raises(ClusterError):
        restarts.take(ClusterError("something else"))


def test_nodes_that_do_not_come_end_the_run():
    def missing() -> None:
        raise ClusterError("1 of 2 nodes")

    restarts, _, _ = made(3, missing)
    restarts.take(RankHung("x"))
    with pytest.raises(ClusterError, match="1 of 2 nodes"):
        restarts.wait()
    assert not can_cure(ClusterError("1 of 2 nodes")) and can_cure(P2PError("x")) and can_cure(DeviceError("x"))


# A whole run, with a trainer that has no workers.


class Faulty(Steps):
    """Raises what is listed, once each: by step, or in `start` by the number of the start."""

    total_steps = steps_per_epoch = 6
    faults: ClassVar[dict[int, list[Exception]]] = {}
    at_start: ClassVar[list[Exception | None]] = []
    starts: ClassVar[list[int | None]] = []
    close_error: ClassVar[Exception | None] = None

    def start(self, checkpoint: Checkpoint | None = None) -> None:
        self.starts.append(None if checkpoint is None else checkpoint.step)
        error = self.at_start.pop(0) if self.at_start else None
        if error is not None:
            raise error

    def learn(self, taken: int) -> int:
        if self.faults.get(taken):
            raise self.faults[taken].pop()
        return taken

    def close(self) -> None:
        if self.close_error is not None:
            raise self.close_error


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    Faulty.starts.clear()
    root = f"trainer.default_local_dir={tmp_path / 'runs'}"
    more = ["trainer.experiment_name=a", "trainer.max_restarts=2", "trainer.restart_wait_s=0", "checkpoint.freq=2"]
    return load(tmp_path, root, *more)


def steps_of(cfg: RunConfig) -> list[int]:
    file = Path(cfg.trainer.run_dir) / "metrics.jsonl"
    return [row["step"] for row in map(json.loads, file.read_text().splitlines())]


def test_a_run_goes_on_from_its_newest_checkpoint_and_ends_whole(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        Faulty, "faults", {5: [RankHung("ranks 0-1 gave no sign"), RankDied("rank 1 died (a, process 3)")]}
    )
    session.run(cfg, Faulty)
    assert Faulty.starts == [None, 4, 4] and steps_of(cfg) == list(range(7))
    said = capsys.readouterr().out
    assert "restart 1 of 2 in 0 s; the cause: RankDied: rank 1 died (a, process 3)" in said
    assert said.count("restart 2 of 2") == 2 and "restart 2 of 2: step 5 is complete, " in said


def test_without_a_checkpoint_it_begins_again_and_a_broken_one_is_passed_over(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Faulty, "faults", {2: [NodeLost("node b")]})
    session.run(cfg, Faulty)
    assert Faulty.starts == [None, None] and steps_of(cfg) == list(range(7))
    assert "beginning again from step 1: there is no checkpoint yet" in capsys.readouterr().out
    Faulty.starts.clear()
    replaced = replace(cfg, trainer=replace(cfg.trainer, overwrite="replace", resume_mode="disable"))
    monkeypatch.setattr(Faulty, "faults", {5: [NodeLost("node b")]})
    monkeypatch.setattr(Faulty, "at_start", [None, BrokenCheckpoint("step_000004: a checksum"), None])
    session.run(replaced, Faulty)
    assert Faulty.starts == [None, 4, 2] and steps_of(cfg) == list(range(7))
    assert "passed over a broken checkpoint: step_000004: a checksum" in capsys.readouterr().out


def test_a_fault_before_the_folder_is_this_runs_does_not_lead_into_an_earlier_run(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    session.run(cfg, Faulty)
    Faulty.starts.clear()
    monkeypatch.setattr(Faulty, "at_start", [RankHung("__init__"), None])
    session.run(replace(cfg, trainer=replace(cfg.trainer, overwrite="replace", resume_mode="disable")), Faulty)
    assert Faulty.starts == [None, None]


def test_what_no_restart_cures_ends_the_run_with_the_errors_of_closing_as_notes(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Faulty, "faults", {3: [DataError("row 7")]})
    monkeypatch.setattr(Faulty, "close_error", ClusterError("processes do not end"))
    with pytest.raises(DataError, match="row 7") as caught:
        session.run(cfg, Faulty)
    assert caught.value.__notes__ == ["the workers could not be closed either: ClusterError: processes do not end"]
    assert Faulty.starts == [None]


def test_an_error_of_closing_does_not_end_a_good_run(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Faulty, "close_error", ClusterError("processes do not end"))
    session.run(cfg, Faulty)
    assert steps_of(cfg) == list(range(7)) and (Path(cfg.trainer.run_dir) / "final").is_dir()
    assert "the workers could not be closed (ClusterError: processes do not end)" in capsys.readouterr().err
