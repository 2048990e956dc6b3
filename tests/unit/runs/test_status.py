"""What `megatron-rl status` says of a run's folder: alive, dead or over, and since when."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.observe import run_status
from megatron_rl.observe.run_status import STATUS_FILE, LastCheckpoint, RunStatus, StatusWriter, read_status
from megatron_rl.runs import folder, session
from megatron_rl.runs.folder import LOCK_FILE, LockHolder, RunFolder, lock_holder
from megatron_rl.runs.status import LATE_S, as_table, as_text, duration, judge, report_run, runs_in
from megatron_rl.runs.trainer import Trainer
from tests.helpers.config import load
from tests.unit.runs.test_resume import Trained

NOW = 1_000_000.0
GOING = RunStatus("update", NOW - 3, 37, 80, "node-a", 12, NOW - 900, NOW - 2, seconds_a_step=4.25, left_s=182.0)
FREE, HELD = LockHolder(False), LockHolder(True)
MINE, OTHER = LockHolder(True, 12), LockHolder(True, 13)
NO_LOCKS = LockHolder(False, has_locks=False)


@pytest.mark.parametrize(
    ("status", "holder", "here", "state", "note"),
    [
        (None, HELD, "node-a", "starting", "not written yet"),
        (None, FREE, "node-a", "unknown", "there is no status.json"),
        (GOING, MINE, "node-a", "running", ""),
        (GOING, HELD, "login", "running", ""),
        (GOING, OTHER, "node-b", "running", ""),  # a process id of another host says nothing
        (GOING, OTHER, "node-a", "starting", "process 13"),
        (GOING, FREE, "node-a", "dead", "in phase update"),
        (replace(GOING, phase="starting"), MINE, "node-a", "starting", ""),
        (replace(GOING, updated=NOW - LATE_S - 1), MINE, "node-a", "running", "no sign of life for 0:01:01"),
        (replace(GOING, phase="done"), FREE, "node-a", "done", ""),
        (replace(GOING, phase="done"), MINE, "node-a", "done", ""),  # it draws its curves
        (replace(GOING, phase="done"), OTHER, "node-a", "starting", "process 13"),
        (replace(GOING, phase="stopped", message="by SIGTERM"), FREE, "node-a", "stopped", "by SIGTERM"),
        (replace(GOING, phase="failed", message="rank 3 died"), FREE, "node-a", "failed", "rank 3 died"),
        (GOING, NO_LOCKS, "node-a", "running", "no locks"),
        (replace(GOING, updated=NOW - LATE_S), NO_LOCKS, "node-a", "dead", "no locks"),
        (replace(GOING, phase="done"), NO_LOCKS, "node-a", "done", ""),
    ],
)
def test_the_state_of_a_run(status: RunStatus | None, holder: LockHolder, here: str, state: str, note: str) -> None:
    judged, text = judge(status, holder, here, NOW)
    assert judged == state and note in text and (note or not text)


def test_seconds_are_read_by_people() -> None:
    texts = [duration(seconds) for seconds in (-1, 0.4, 59.4, 59.6, 3661, 86400 + 60, 3 * 86400)]
    assert texts == ["0 s", "0 s", "59 s", "0:01:00", "1:01:01", "1 day 0:01:00", "3 days 0:00:00"]


def write_status(run: Path, status: RunStatus) -> None:
    writer = StatusWriter(run)
    writer.discard()
    writer._status = status
    writer._write()
    file = run / STATUS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"updated": status.updated}))


def test_a_run_in_words(tmp_path: Path) -> None:
    saved = LastCheckpoint("checkpoints/step_000030", 30, NOW - 41)
    write_status(tmp_path, replace(GOING, checkpoint=saved, restarts=1, trouble=["WARNING x: disk is slow"]))
    report = replace(report_run(tmp_path, NOW), state="running", note="")
    lines = as_text(report, NOW).splitlines()
    assert lines[0] == f"{tmp_path}: running on node-a (process 12), step 37 of 80"
    assert [line.split(maxsplit=1) for line in lines[1:] if "started" not in line] == [
        ["phase", "update, for 3 s"],
        ["rate", "4.25 s a step, 0:03:02 left"],
        ["checkpoint", "checkpoints/step_000030 (step 30), 41 s old"],
        ["restarts", "1"],
        ["trouble", "WARNING x: disk is slow"],
    ]


def test_runs_of_a_folder_are_one_line_each(tmp_path: Path) -> None:
    for name, step in (("b", 3), ("a", 7)):
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, replace(GOING, step=step, phase="done"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old/metrics.jsonl").touch()
    (tmp_path / "no run").mkdir()
    runs = runs_in(tmp_path)
    assert [run.name for run in runs] == ["old", "b", "a"]
    assert runs_in(runs[1]) == [runs[1]]
    head, *rows = [line.split("  ") for line in as_table([report_run(run, NOW) for run in runs], NOW).splitlines()]
    assert head[0] == "run"
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert [row[1:3] for row in cells] == [["unknown", "-"], ["done", "3/80"], ["done", "7/80"]]


@contextmanager
def controller(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder as a run does, and is in the middle of a step."""
    code = """if True:
        import sys, time
        from pathlib import Path
        from megatron_rl.observe.run_status import LastCheckpoint, StatusWriter
        from megatron_rl.runs.folder import RunFolder
        with RunFolder(Path(sys.argv[1])) as folder:
            print("claimed", flush=True)
            sys.stdin.readline()
            folder.begin()
            writer = StatusWriter(folder.path)
            writer.begin(total=9, step=3)
            writer.checkpoint_done(LastCheckpoint("checkpoints/step_000004", 4, time.time()))
            with writer.during("generate"):
                writer.step_done(5)
                time.sleep(0.5)
                print("in a step", flush=True)
                time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdin=-1, stdout=-1, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_that_is_killed_is_dead_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"

    def told() -> dict[str, Any]:
        assert main(["status", str(run), "--json"]) == 0
        return json.loads(capsys.readouterr().out)[0]

    with controller(run) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        assert (told()["state"], told()["status"]) == ("starting", None)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "in a step\n"
        going = told()
        assert (going["state"], going["status"]["pid"]) == ("running", process.pid)
        assert (going["status"]["step"], going["status"]["phase"]) == (5, "generate")
        process.kill()
        process.wait()
        dead = told()
    assert dead["state"] == "dead" and "in phase generate" in dead["note"]
    assert dead["status"]["checkpoint"]["step"] == 4 and time.time() - dead["status"]["updated"] < 20
    assert main(["status", str(run)]) == 0
    assert f"{run}: dead on {platform.node()} (process {process.pid}), step 5 of 9" in capsys.readouterr().out


class Told(Trained):
    """Keeps what status.json says while a step is at something."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.file = Path(cfg.trainer.run_dir) / STATUS_FILE
        self.seen: list[RunStatus] = []

    def learn(self, taken: Any) -> Any:
        with self.during("update"):
            learned = super().learn(taken)
            self.see("update", taken[0] - 1)
        return learned

    def validate(self, step: int) -> Any:
        if step:
            self.see("validate", step)
        return super().validate(step)

    def see(self, phase: str, step: int) -> None:
        deadline = time.monotonic() + 5
        while (status := read_status(self.file)).phase != phase or status.step != step:
            assert time.monotonic() < deadline, (phase, step, status)
            time.sleep(0.01)
        self.seen.append(status)


def test_a_run_tells_its_steps_phases_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "LEAST_S", 0.01)
    trainers: list[Told] = []
    settings = [
        f"data.val_files={tmp_path}/train.jsonl",
        "checkpoint.freq=1",
        "trainer.test_freq=2",
        "trainer.total_training_steps=3",
    ]
    cfg = load(tmp_path, *settings, f"trainer.default_local_dir={tmp_path}/runs", "trainer.experiment_name=a")

    def make(cfg: Any) -> Told:
        trainers.append(Told(cfg))
        return trainers[-1]

    session.run(cfg, make)
    (trainer,) = trainers
    assert [(status.phase, status.step) for status in trainer.seen] == [
        ("update", 0),
        ("update", 1),
        ("validate", 2),
        ("update", 2),
        ("validate", 3),
    ]
    assert [status.checkpoint.step if status.checkpoint else 0 for status in trainer.seen][:2] == [0, 1]
    report = report_run(tmp_path / "runs/a", time.time())
    assert report.status is not None and (report.state, report.status.step) == ("done", 3)
    assert report.status.checkpoint is not None
    assert (tmp_path / "runs/a" / report.status.checkpoint.path / "manifest.json").is_file()


def test_a_trainer_tells_the_nodes_of_its_flow(tmp_path: Path) -> None:
    trainer, writer = Trainer(load(tmp_path)), StatusWriter(tmp_path)
    trainer.tell(writer.during)
    assert trainer.flow.during == writer.during
    writer.discard()


def test_asking_changes_nothing_and_keeps_no_run_out(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as claimed:
        claimed.begin()
        (tmp_path / "metrics.jsonl").touch()
        assert lock_holder(tmp_path) == LockHolder(True, os.getpid())
    before = {path: path.stat() for path in (tmp_path, *tmp_path.iterdir())}
    assert lock_holder(tmp_path) == FREE and report_run(tmp_path, time.time()).state == "unknown"
    assert {path: path.stat() for path in before} == before
    RunFolder(tmp_path).release()
    assert (tmp_path / LOCK_FILE).exists()


def test_a_holder_on_another_host_is_seen_by_the_lock_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_local_holder", lambda file: None)
    with RunFolder(tmp_path):
        assert lock_holder(tmp_path) == HELD
    assert lock_holder(tmp_path / "none") == FREE


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / STATUS_FILE).write_text("{}")
    assert main(["status", str(tmp_path / "none"), str(tmp_path / "odd")]) == 2
    err = capsys.readouterr().err.splitlines()
    assert (
        err[0]
        == f"megatron-rl status: {tmp_path}/none: there is no run in this folder -- name a run's folder, or one of runs"
    )
    assert "status.json: is no status" in err[1]
