"""A rank of a run is killed: Ray and the rank are started again, and the run ends as if nothing had been.

The rank's model is one number, so that this is about processes; tests/e2e/test_restarts.py trains a real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from megatron_rl.cluster import ray_wait
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.janitor import kept_clean
from megatron_rl.cluster.ray_backend import RayBackend
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.runs import session
from megatron_rl.runs.checkpoints import Checkpoint
from megatron_rl.runs.trainer import StepResult
from tests.helpers.config import load
from tests.unit.config.test_folders import Steps

STEPS, KILLED_IN = 12, 7


class Worker:
    def __init__(self, rank: int, world: int, number: int) -> None:
        self.number = number

    def step(self, step: int) -> int:
        self.number = (self.number * 31 + step) % 1_000_003
        return self.number

    def state(self) -> int:
        return self.number


class Trained(Steps):
    total_steps = steps_per_epoch = STEPS
    group: WorkerGroup

    def __init__(self, cfg: RunConfig, killed_in: list[int]) -> None:
        super().__init__(cfg)
        self.killed_in, self.value = killed_in, 0

    def start(self, checkpoint: Checkpoint | None = None) -> None:
        number = 1 if checkpoint is None else int((checkpoint.path / "actor" / "weights").read_text())
        cluster = ClusterConfig(device="cpu", num_cpus_per_rank=0.5)
        self.group = start_group(Worker, (number,), cluster, RankGrid.flat(1), "cpu")

    def learn(self, taken: int) -> int:
        if taken in self.killed_in:
            self.killed_in.remove(taken)
            assert isinstance(self.group.backend, RayBackend)
            os.kill(self.group.backend.pids[0], signal.SIGKILL)
        self.value = self.group.rank0(Worker.step, taken)
        return taken

    def publish(self, learned: int) -> StepResult:
        return StepResult({"number": float(self.value)}, [])

    def state_text(self) -> str:
        return str(self.group.rank0(Worker.state))

    def close(self) -> None:
        self.group.close()


def expected() -> list[int]:
    worker = Worker(0, 1, 1)
    return [worker.step(step) for step in range(1, STEPS + 1)]


def test_a_rank_killed_in_step_7_of_12_costs_one_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_wait, "GRACE_S", 1.0)
    root = f"trainer.default_local_dir={tmp_path / 'runs'}"
    settings = ["trainer.max_restarts=2", "trainer.restart_wait_s=0.1", "checkpoint.freq=3"]
    cfg = load(tmp_path, root, "trainer.experiment_name=a", *settings)
    left = [KILLED_IN]
    with kept_clean() as temporary:
        session.run(cfg, lambda cfg: Trained(cfg, left))
    rows = map(json.loads, (Path(cfg.trainer.run_dir) / "metrics.jsonl").read_text().splitlines())
    numbers = [(row["step"], row["number"]) for row in rows if row["step"]]
    assert numbers == list(zip(range(1, STEPS + 1), expected(), strict=True)), "each step once, as in an unbroken run"
    said = capsys.readouterr().out
    assert said.count("; the cause: RankDied: Worker.step: rank 0 died (") == 1 and "restart 2" not in said
    assert "going on after step 6, from " in said
    seconds = re.search(r"restart 1 of 2: step 7 is complete, ([\d.]+) s after the fault was named", said)
    assert seconds is not None and float(seconds[1]) > 0.0
    assert not temporary.exists(), "temporary files are left"
    names = [child.name() for child in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "ray" in name or name == "gcs_server"], "processes are left"
