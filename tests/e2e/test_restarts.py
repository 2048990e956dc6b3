"""A run whose rank is killed builds its workers again and ends as if nothing had been (trainer.max_restarts).

With real models; tests/e2e/test_restart_on_ray.py is the short form.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.cluster import ray_wait
from megatron_rl.cluster.janitor import kept_clean
from megatron_rl.cluster.ray_backend import RayBackend
from megatron_rl.config.load import load_config
from megatron_rl.runs import session
from megatron_rl.runs.loop import OneStep, synchronous
from megatron_rl.runs.trainer import Trainer

REPO = Path(__file__).resolve().parents[2]
STEPS, KILLED_IN = 12, 7


def killed_in(steps: list[int]) -> Callable[..., Any]:
    """The synchronous loop; the first rank is killed as each of the steps begins."""
    left = list(steps)

    @contextmanager
    def loop(trainer: Trainer, buffer: Any, state: Any) -> Generator[OneStep]:
        def one_step(step: int) -> Any:
            if step in left:
                left.remove(step)
                backend = trainer.parts.models.group.backend
                assert isinstance(backend, RayBackend)
                os.kill(backend.pids[0], signal.SIGKILL)
            return inner(step)

        with synchronous(trainer, buffer, state) as inner:
            yield one_step

    return loop


def run(data: Path, name: str, killed: list[int], *more: str) -> None:
    settings = [
        f"model.path={data / 'model'}",
        "model.init=random",
        f"data.train_files={data / 'sft_train.parquet'}",
        f"data.val_files={data / 'sft_val.parquet'}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.target_loss=null",
        "trainer.test_freq=0",
        "actor.optim.lr_warmup_steps=5",
        "checkpoint.freq=3",
        f"trainer.default_local_dir={data.parent}",
        f"trainer.experiment_name={name}",
        "trainer.restart_wait_s=0.1",
        "cluster.num_cpus_per_rank=0.5",
        *more,
    ]
    cfg = load_config([str(REPO / "configs" / "sft-add2-1n1g.yaml")], settings)
    with kept_clean():
        session.run(cfg, Trainer, killed_in(killed))
    assert not [one for one in psutil.Process().children(recursive=True) if "RankHost" in one.name()], "a rank is left"


def rows(data: Path, name: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what a clock or the system says."""
    lines = (data.parent / name / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(("time/", "perf/", "memory/"))}
        for line in lines
    ]


def weights(data: Path, name: str) -> bytes:
    return (data.parent / name / "final" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_rank_killed_in_step_7_of_12_changes_nothing_of_the_end(
    data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_wait, "GRACE_S", 1.0)
    run(data, "whole", [])
    capfd.readouterr()
    run(data, "killed", [KILLED_IN], "trainer.max_restarts=2")
    said = capfd.readouterr().out
    assert [row["step"] for row in rows(data, "killed")] == list(range(1, STEPS + 1))
    assert rows(data, "killed") == rows(data, "whole")
    assert weights(data, "killed") == weights(data, "whole")
    assert said.count("restart 1 of 2 in 0.1 s; the cause: RankDied: TrainWorker.") == 1 and "restart 2" not in said
    assert f"rank 0 died ({os.uname().nodename}, process " in said
    # The checkpoint of step 6 may have been under way when the rank was killed.
    after = re.search(r"going on after step ([36]), from ", said)
    assert after is not None
    next_step = int(after[1]) + 1
    seconds = re.search(rf"restart 1 of 2: step {next_step} is complete, ([\d.]+) s after the fault was named", said)
    assert seconds is not None and float(seconds[1]) > 0.0
    print(f"restart: {seconds[0]}")
