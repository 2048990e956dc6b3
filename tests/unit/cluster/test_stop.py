"""Signals in every phase of a run, a second signal, closed and full standard output, a disk that fills up."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster import stop
from megatron_rl.errors import ConfigError
from megatron_rl.observe.sinks import JsonlSink, Sinks, read_metrics
from tests.helpers.config import load
from tests.unit.config.test_folders import Steps, names, run, with_trainer

# A run of three steps whose phases take long. Each says where it is; the one under test waits for the signal.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from megatron_rl.cluster import stop
from megatron_rl.runs import session
from tests.helpers.config import load
from tests.unit.config.test_folders import Steps
from dataclasses import replace

def at(phase):
    if phase == wanted:
        print("at", phase, flush=True)
        for _ in range(60):
            time.sleep(0.02)

class Slow(Steps):
    def start(self, checkpoint=None):
        super().start(checkpoint)
        at("start")
    def take(self, step):
        at(f"rollout {step}")
        return super().take(step)
    def learn(self, taken):
        stop.commit()
        at(f"update {taken}")
        return super().learn(taken)
    def validate(self, step):
        at(f"validation {step}")
        return super().validate(step)
    def save(self, path, background=False):
        at(f"save {Path(path).name}")
        super().save(path, background)
    def close(self):
        print("closed", flush=True)

def train(folder, phase, overrides):
    global wanted
    wanted = phase
    cfg = load(folder, f"trainer.default_local_dir={folder / 'runs'}", "trainer.experiment_name=a", *overrides)
    try:
        with stop.signals():
            session.run(cfg, Slow)
    except KeyboardInterrupt as interrupt:
        print(interrupt, flush=True)
        return stop.exit_code(stop.received(), getattr(interrupt, "can_go_on", False))
    return 0

def in_a_fork(folder, phase, overrides, number):
    folder.mkdir()
    out, err = folder / "out", folder / "err"
    child = os.fork()
    if child == 0:
        for name, descriptor in ((out, 1), (err, 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
        code = 99
        try:
            code = train(folder, phase, overrides)
        finally:
            os._exit(code)
    for _ in range(3000):
        if out.exists() and f"at {phase}\\n" in out.read_text():
            break
        time.sleep(0.02)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.read_text(), err.read_text()

folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
if isinstance(task, str):
    sys.exit(train(folder, task, sys.argv[3:]))
# Imports take seconds, so all phases run in copies of one process.
found = {name: in_a_fork(folder / name.replace(" ", "-"), name, *rest) for name, *rest in task}
print(json.dumps(found))
"""
NONE: set[str] = set()
WEIGHTS = "; its weights are in"
PHASES: dict[str, tuple[signal.Signals, list[str], str, set[str]]] = {
    "start": (signal.SIGUSR1, [], "before the first step was complete: there is nothing to save", NONE),
    "validation 0": (signal.SIGINT, [], "before the first step was complete", NONE),
    "rollout 1": (signal.SIGTERM, [], "before the first step was complete: there is nothing to save", NONE),
    "rollout 2": (signal.SIGINT, [], WEIGHTS, {"global_step_1"}),
    "update 1": (signal.SIGTERM, [], WEIGHTS, {"global_step_1"}),
    "update 2": (signal.SIGUSR2, ["trainer.save_freq=1"], WEIGHTS, {"global_step_1", "global_step_2"}),
    "save actor": (signal.SIGUSR1, ["trainer.save_freq=2"], WEIGHTS, {"global_step_2"}),
    "save final": (signal.SIGINT, [], WEIGHTS, {"final"}),
    "validation 3": (signal.SIGTERM, ["checkpoint.freq=0"], f"no checkpoint is kept{WEIGHTS}", {"final"}),
    "update 3": (signal.SIGHUP, ["trainer.save_freq=0"], "so no weights are kept", set()),
}
STEPS_DONE = {"rollout 2": 1, "update 1": 1, "update 2": 2, "save actor": 2, "save final": 3, "update 3": 3}
"""Step of the checkpoint."""
STEPS_WRITTEN = {"rollout 2": 2, "update 1": 2, "update 2": 3, "save actor": 3, "save final": 4, "validation 3": 4}


def start(folder: Path, phase: str, overrides: list[str]) -> subprocess.Popen[str]:
    folder.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(phase), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], phase: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line == f"at {phase}\n":
            return
    pytest.fail(f"never at {phase}: {process.stderr.read() if process.stderr else ''}")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str, Path]]:
    """Phase -> exit status, standard output and error after its signal, and the folder of runs."""
    root = tmp_path_factory.mktemp("stop")
    task = [(phase, overrides, number) for phase, (number, overrides, _, _) in PHASES.items()]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), json.dumps(task)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {phase: (*found[phase], root / phase.replace(" ", "-") / "runs") for phase in PHASES}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_saves_the_last_whole_step_and_ends_with_one_line(
    ended: dict[str, tuple[int, str, str, Path]], phase: str
):
    number, _, said, saved = PHASES[phase]
    code, out, err, runs = ended[phase]
    goes_on = phase in STEPS_DONE and number in stop.REQUEUE_SIGNALS
    assert code == (75 if goes_on else 128 + number), err
    last = out.splitlines()[-1]
    assert last.startswith(f"stopped by {number.name} " if said else "") and said in last
    assert "Traceback" not in err and err.count(f"{number.name}: the run saves a checkpoint") == 1
    assert len(err.splitlines()) == 1, err
    assert "closed" in out, "what was started is ended, also while it starts"
    if saved is NONE:
        assert not (runs / "a" / "config.yaml").exists(), "nothing stands in the way of the next try"
        return
    folder = runs / "a"
    if phase in STEPS_DONE:
        path = folder / "checkpoints" / f"step_{STEPS_DONE[phase]:06d}"
        assert f"after step {STEPS_DONE[phase]}: its checkpoint is {path};" in last
        assert json.loads((path / "state.json").read_text())["step"] == STEPS_DONE[phase]
    assert {name for name in names(folder) if name.startswith(("final", "global_step"))} == saved
    assert all(path.read_text() == "weights" for path in folder.rglob("model.safetensors"))
    if phase in STEPS_WRITTEN:
        assert len(read_metrics(folder / "metrics.jsonl")) == STEPS_WRITTEN[phase], "no step's figures are lost"


def test_a_second_signal_ends_at_once(tmp_path: Path):
    with start(tmp_path / "second", "save final", []) as process:
        wait_for(process, "save final")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT and time.monotonic() - began < 1.0
    assert err.splitlines()[-1] == "SIGINT again: ending at once" and "Traceback" not in err


def test_a_signal_that_comes_twice_within_a_moment_counts_once(tmp_path: Path):
    with start(tmp_path / "twice", "save final", ["checkpoint.freq=1"]) as process:
        wait_for(process, "save final")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.03)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and "its weights are in" in out


def test_what_another_thread_holds_is_waited_for():
    done = threading.Event()

    def work() -> None:
        with stop.held():
            entered.set()
            time.sleep(0.3)
            done.set()

    entered = threading.Event()
    with pytest.raises(stop.Stopped), stop.signals():
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        signal.raise_signal(signal.SIGTERM)
        assert not done.is_set(), "the signal waits"
        for _ in range(60):
            time.sleep(0.02)
    assert done.is_set()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_nohup_is_honoured_and_an_interrupt_sent_to_a_background_job_counts():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        with stop.signals():
            signal.raise_signal(signal.SIGHUP)
        assert stop.received() is None
        with pytest.raises(stop.Stopped), stop.signals():
            signal.raise_signal(signal.SIGINT)
        assert stop.received() == signal.SIGINT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Output and disks.


@pytest.mark.parametrize("output", ["closed", "full"])
def test_a_run_goes_on_without_its_standard_output(tmp_path: Path, output: str):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), json.dumps("none")]
    if output == "closed":
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
    else:
        with open("/dev/full", "w") as full:
            process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(timeout=60)
    assert (tmp_path / "run" / "runs" / "a" / "final" / "model.safetensors").exists(), err
    assert err.count("standard output cannot be written") == 1 and "BrokenPipe" not in err


def _limit_files(most: int) -> Iterator[None]:
    """Files may have so many bytes: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_metrics_that_could_not_be_written_are_said_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    sinks = Sinks([JsonlSink(tmp_path / "metrics.jsonl")])
    sinks.write(1, {"a": 0.1})
    full = _limit_files(30)
    next(full)
    for step in (2, 3):
        sinks.write(step, {"a": 0.1})
    next(full, None)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1], "no half line stays"
    sinks.write(4, {"a": 0.1})
    sinks.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("metrics.jsonl: step 2 could not be written (") and "training continues" in first
    assert second == "metrics.jsonl: can be written again; no step is missing"


def test_the_last_metrics_are_written_when_the_run_ends_if_there_is_room_by_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    sinks = Sinks([JsonlSink(tmp_path / "metrics.jsonl")])
    full = _limit_files(0)
    next(full)
    sinks.write(1, {"a": 0.1})
    next(full, None)
    sinks.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert caplog.records[-1].getMessage() == "metrics.jsonl: can be written again; no step is missing"


class Failing:
    name, errors = "service", (OSError,)

    def __init__(self, fails: int) -> None:
        self.fails, self.seen = fails, list[int]()

    def write(self, step: int, metrics: Any) -> None:
        if step <= self.fails:
            raise ConnectionError("gone")
        self.seen.append(step)

    def close(self) -> None:
        raise ConnectionError("gone")


def test_a_sink_that_fails_costs_its_own_figures_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    failing = Failing(2)
    sinks = Sinks([failing, JsonlSink(tmp_path / "metrics.jsonl")])
    for step in (1, 2, 3):
        sinks.write(step, {"a": 1.0})
    sinks.close()
    assert failing.seen == [3] and len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "service: step 1 could not be written (gone); training continues",
        "service: could not be closed (gone)",
        "service: 2 step(s) are missing",
    ]


def test_a_folder_that_cannot_be_written_ends_the_run_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cfg = load(tmp_path, f"trainer.default_local_dir={tmp_path / 'runs'}", "trainer.experiment_name=a")
    full = _limit_files(10)
    next(full)
    try:
        with pytest.raises(ConfigError) as caught:
            run(cfg)
    finally:
        next(full, None)
    (fault,) = caught.value.faults
    assert fault.key == "trainer.default_local_dir" and "cannot be written" in fault.reason
    assert not (tmp_path / "runs").exists()


def test_samples_and_curves_that_cannot_be_written_cost_no_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    cfg = load(tmp_path, f"trainer.default_local_dir={tmp_path / 'runs'}", "trainer.experiment_name=a")

    def first_step(self: Steps, taken: int) -> int:
        folder = tmp_path / "runs" / "a"
        for name in ("rollouts.jsonl", "curves.png"):
            (folder / name).mkdir(exist_ok=True)
        return taken

    monkeypatch.setattr(Steps, "learn", first_step)
    run(with_trainer(cfg, save_freq=-1))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and "samples of step 1 are lost" in said[0] and "curves.png was not drawn" in said[1]
    folder = tmp_path / "runs" / "a"
    assert (folder / "final" / "model.safetensors").exists()
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
