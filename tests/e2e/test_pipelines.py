"""`megatron-rl run`: a pipeline that is killed in a random stage and begun again ends as the unbroken one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megatron_rl.observe.sinks import read_metrics
from megatron_rl.pipeline.check import load_pipeline
from megatron_rl.pipeline.run import run_pipeline
from megatron_rl.pipeline.spec import Stage
from tests.helpers.killing import Warm, outcome, unlike

REPO = Path(__file__).resolve().parents[2]
SMALL = [
    "cluster.backend=inline",
    "data.train_batch_size=8",
    "data.val_batch_size=8",
    "actor.optim.lr_warmup_steps=0",
    "checkpoint.freq=1",
    "trainer.total_training_steps=3",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.target_loss=null",
    "rollout.name=hf",
    "rollout.n=2",
]
REWARD = """
def odd(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 2)

def graded(data_source, solution_str, ground_truth, extra_info):
    return (1 + sum(i * ord(c) for i, c in enumerate(solution_str, 1)) % 97) / 100
"""


def start(folder: Path, file: str, more: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "megatron_rl", "run", file, f"folder={folder}", *SMALL, *more]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=REPO)


def wait_for(text: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while text not in log.read_text(errors="replace"):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def killed_and_begun_again(folder: Path, file: str, more: list[str], text: str, delay: float) -> None:
    """Kill the pipeline after it said a text, then start it until it ends."""
    first, second = folder.with_name("first.log"), folder.with_name("second.log")
    process = start(folder, file, more, first)
    wait_for(text, process, first)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process = start(folder, file, more, second)
    assert process.wait(timeout=400) == 0, second.read_text()[-3000:]


def finished(folder: Path, file: str, more: list[str]) -> Path:
    log = folder.with_name(f"{folder.name}.log")
    assert start(folder, file, more, log).wait(timeout=400) == 0, log.read_text()[-3000:]
    return folder


def metrics(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / "table" / "table.json").read_text())
    return {
        model: {
            name: {key: value for key, value in of_data.items() if key.startswith("val/")}
            for name, of_data in of_model.items()
        }
        for model, of_model in table.items()
    }


def same(one: Path, other: Path, trained: tuple[str, ...]) -> None:
    assert [(name, *unlike(outcome(one / name), outcome(other / name))) for name in trained] == [(n,) for n in trained]
    assert metrics(one) == metrics(other)


def few(data: Path, name: str, count: int) -> Path:
    """The first rows of a data set."""
    file = data / f"few_{name}.parquet"
    pq.write_table(pq.read_table(data / f"{name}.parquet").slice(0, count), file)
    return file


class Verbs:
    """Starts a pipeline's verbs from a process that has imported what they need, and kills one of them."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self._warm, self._folder, self._number = warm, folder, 0
        self.kills_at = ""
        """What the log of the process to be killed says before; none is killed if empty."""

    def __call__(self, verb: str, stage: Stage, arguments: list[str]) -> int:
        self._number += 1
        log = self._folder / f"{self._number}-{stage.name}.log"
        process = self._warm.start([*stage.config, *arguments], log, verb)
        if self.kills_at and process.wait_for(self.kills_at):
            os.kill(process.pid, signal.SIGKILL)
        code = process.end()
        assert code in (0, -signal.SIGKILL), log.read_text()[-3000:]
        return code


def test_a_pipeline_that_is_killed_while_it_trains_ends_as_the_unbroken_one(
    data: Path, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    file = tmp_path / "two.yaml"
    file.write_text(
        "folder: replaced\nstages:\n"
        f"  - {{name: sft, kind: sft, config: configs/sft-add2-1n1g.yaml, set: {{model.path: {data}/model}}}}\n"
        "  - name: table\n    kind: eval\n    config: configs/sft-add2-1n1g.yaml\n"
        f"    models: {{sft: '${{sft.model}}'}}\n    data: {{held-out: {few(data, 'sft_val', 8)}}}\n"
    )
    more = [f"sft.data.train_files={few(data, 'sft_train', 24)}", f"sft.data.val_files={few(data, 'sft_val', 8)}"]
    more += ["sft.trainer.total_training_steps=6", "checkpoint.async_save=false"]
    verbs, said = Verbs(warm, tmp_path), list[str]()
    for name, kills_at, code in (("killed", "step_000002: ", -9), ("killed", "", 0), ("whole", "", 0)):
        verbs.kills_at = kills_at
        pipeline = load_pipeline(str(file), [f"folder={tmp_path / name}", *SMALL, *more])
        assert run_pipeline(pipeline, said.append, verbs) == code
    assert "stage 1 of 2, sft: goes on" in said
    again = (tmp_path / "2-sft.log").read_text()
    assert "step_000003: " in again and "step_000002: " not in again
    same(tmp_path / "killed", tmp_path / "whole", ("sft",))


def test_sft_samples_its_validation_with_the_newest_weights_and_goes_on_alike(
    data: Path, tmp_path: Path, warm: Warm
) -> None:
    """What SFT's validation scores is what an evaluation of the same weights scores, by data source too."""
    (data.parent / "reward.py").write_text(REWARD)
    rows = pq.read_table(few(data, "val", 8)).to_pylist()
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row | {"data_source": "ab"[i % 2]}) + "\n" for i, row in enumerate(rows)))
    engine = [
        f"model.path={data / 'model'}",
        "model.dtype=float32",
        f"reward.function={data.parent / 'reward.py'}:graded",
    ]
    engine += ["cluster.backend=inline", "rollout.name=hf"]
    own = [f"data.train_files={few(data, 'sft_train', 24)}", f"data.val_files={few(data, 'sft_val', 8)}"]
    own += [f"data.val_prompt_files={file}", "data.train_batch_size=8", "trainer.test_freq=2", "checkpoint.freq=2"]
    own += ["trainer.total_training_steps=4", "actor.optim.lr_warmup_steps=0", "trainer.target_loss=null"]
    sft, grpo = (str(REPO / "configs" / f"{name}-add2-1n1g.yaml") for name in ("sft", "grpo"))

    def trains(name: str, kills_at: str = "") -> None:
        folder = [f"trainer.default_local_dir={tmp_path}", f"trainer.experiment_name={name}"]
        process = warm.start([sft, *engine, *own, *folder], tmp_path / f"{name}.log")
        if kills_at:
            assert process.wait_for(kills_at)
            os.kill(process.pid, signal.SIGKILL)
        assert process.end() == (-signal.SIGKILL if kills_at else 0), (tmp_path / f"{name}.log").read_text()[-3000:]

    trains("whole")
    trains("killed", "step_000002: ")
    trains("killed")
    assert not unlike(outcome(tmp_path / "killed"), outcome(tmp_path / "whole"))
    last = read_metrics(tmp_path / "whole" / "metrics.jsonl")[-1]
    assert {"val/loss", "val/reward", "val/reward/a", "val/reward/b"} <= last.keys() and 0 < last["val/reward"] < 1
    final = [*engine, f"model.path={tmp_path / 'whole' / 'final'}", f"data.val_files={file}", "--out"]
    assert warm.start([grpo, *final, str(tmp_path / "eval")], tmp_path / "eval.log", "eval").end() == 0
    scored = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert [last[f"val/reward{of}"] for of in ("", "/a", "/b")] == [
        scored[f"val/accuracy{of}"] for of in ("", "/a", "/b")
    ]
    assert last["val/response_length"] == scored["val/response_length"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_shipped_pipeline_killed_in_a_random_stage_ends_as_the_unbroken_one(
    data: Path, tmp_path: Path, seed: int
) -> None:
    (data.parent / "reward.py").write_text(REWARD)
    val, rows = few(data, "val", 8), few(data, "train", 40)
    more = [
        f"reward.function={data.parent / 'reward.py'}:odd",
        f"sft.model.path={data / 'model'}",
        f"sft.data.train_files={few(data, 'sft_train', 64)}",
        f"sft.data.val_files={few(data, 'sft_val', 8)}",
        f"grpo.data.train_files={rows}",
        f"grpo.data.val_files={val}",
        f"pick.data.val_files={rows}",
        f"again.data.val_files={few(data, 'sft_val', 8)}",
    ]
    # Below the shipped file: its evaluation's data is in a checkout's own folder.
    file = tmp_path / "pipeline.yaml"
    shipped = (REPO / "configs" / "pipeline-add2.yaml").read_text(encoding="utf-8")
    file.write_text(shipped.replace("held-out: runs/quickstart/data/val.parquet", f"held-out: {val}"))
    draw = random.Random(seed)
    name = draw.choice(["sft", "grpo", "pick", "again", "table"])
    killed_and_begun_again(tmp_path / "killed", str(file), more, f", {name}: begins", 20.0 * draw.random())
    same(tmp_path / "killed", finished(tmp_path / "whole", str(file), more), ("sft", "grpo", "again"))
    rows_of = [(tmp_path / name / "pick" / "rows.jsonl").read_text() for name in ("killed", "whole")]
    assert rows_of[0] == rows_of[1]
