"""The two loops do the same steps, and count them from the state; an error ends either."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.observe.sinks import read_metrics
from megatron_rl.runs import session
from megatron_rl.runs.checkpoints import Checkpoint
from megatron_rl.runs.loop import Loop, synchronous
from megatron_rl.runs.loop_async import asynchronous
from megatron_rl.runs.state import RunState
from megatron_rl.runs.trainer import StepResult
from tests.helpers.config import load
from tests.unit.config.test_folders import Steps

LOOPS: dict[str, Loop[Any]] = {"synchronous": synchronous, "asynchronous": asynchronous}


class Weights(Steps):
    """A policy of one number: samples depend on it and on the step, updates on the samples."""

    def __init__(self, cfg: Any, fails: str = "") -> None:
        super().__init__(cfg, fails)
        self.weight, self.published, self.log = 1, 1, list[str]()
        self.threads: set[str] = set()

    def take(self, step: int) -> Any:
        self.threads.add(threading.current_thread().name)
        self.log.append(f"take {step}")
        if self.fails == f"take {step}":
            raise RewardError("reward failed")
        return (step, self.published * 31 + step)

    def learn(self, taken: Any) -> Any:
        step, sample = taken
        self.log.append(f"learn {step}")
        self.weight = (self.weight * 17 + sample) % 1009
        return step

    def publish(self, learned: int) -> StepResult:
        self.log.append(f"publish {learned}")
        self.published = self.weight
        return StepResult({"reward/mean": float(self.weight), "time/step": 0.1}, [])

    def stateful(self) -> dict[str, Any]:
        return {}

    def state_text(self) -> str:
        return f"{self.weight} {self.published}"

    def start(self, checkpoint: Checkpoint | None = None) -> None:
        super().start(checkpoint)
        if checkpoint is not None:
            numbers = (checkpoint.path / "actor" / "weights").read_text().split()
            self.weight, self.published = map(int, numbers)

    def weights_text(self) -> str:
        return str(self.weight)

    def validate(self, step: int) -> Any:
        self.log.append(f"validate {step}")
        return super().validate(step)


def trained(folder: Path, loop: Loop[Any], fails: str = "") -> tuple[Weights, list[dict[str, Any]]]:
    """A run of three steps; what each step's metrics were, times left out."""
    cfg = load(folder, f"trainer.default_local_dir={folder / 'runs'}", "trainer.experiment_name=a")
    cfg = replace(cfg, trainer=replace(cfg.trainer, overwrite="replace", test_freq=1))
    made: list[Weights] = []

    def make(cfg: Any) -> Weights:
        made.append(Weights(cfg, fails))
        return made[0]

    session.run(cfg, make, loop)
    rows = read_metrics(folder / "runs" / "a" / "metrics.jsonl")
    return made[0], [{name: row[name] for name in ("step", "reward/mean") if name in row} for row in rows]


def test_at_staleness_0_the_asynchronous_loop_is_the_synchronous_one(tmp_path: Path) -> None:
    """Equal numbers, and equal order: a step is sampled once the validation of the step before is over."""
    by_loop = {name: trained(tmp_path, loop) for name, loop in LOOPS.items()}
    (here, rows), (there, other_rows) = by_loop["synchronous"], by_loop["asynchronous"]
    assert rows == other_rows and len(rows) == 4
    assert here.log == there.log
    assert here.log[:5] == ["validate 0", "take 1", "learn 1", "publish 1", "validate 1"]
    assert here.threads == {threading.current_thread().name} and all("producer" in name for name in there.threads)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_error_while_sampling_ends_the_run(tmp_path: Path, loop: str) -> None:
    with pytest.raises(RewardError, match="reward failed"):
        trained(tmp_path, LOOPS[loop], "take 2")
    rows = read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1], "the step before is written"


def test_older_experience_is_not_offered_yet(tmp_path: Path) -> None:
    trainer, state = Weights(load(tmp_path)), RunState({})
    with (
        pytest.raises(ConfigError, match=r"trainer.max_staleness: 1 -- .* not offered yet") as caught,
        asynchronous(trainer, RolloutBuffer[Any](1), state),
    ):
        pass
    assert caught.value.faults[0].cure == "set it to 0" and trainer.log == []
