"""What is done, what goes on and what begins again; the verbs are stood in for by what they leave behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.pipeline.check import load_pipeline
from megatron_rl.pipeline.run import STATE_FILE, TABLE_FILE, run_pipeline
from megatron_rl.pipeline.spec import Stage
from tests.helpers.config import make_model, write, write_headers

BASE = """
model: {{path: {folder}/model}}
data: {{max_prompt_length: 16, max_response_length: 8}}
reward: {{function: exact_match}}
"""
STAGES = """
folder: {folder}/runs
set:
  data: {{train_files: {folder}/train.jsonl, val_files: {folder}/train.jsonl}}
stages:
  - {{name: sft, kind: sft, config: {folder}/base.yaml, set: {{algorithm.name: sft, model.init: random}}}}
  - {{name: pick, kind: sample, config: {folder}/base.yaml, set: {{model.path: "${{sft.model}}"}}}}
  - name: again
    kind: sft
    config: {folder}/base.yaml
    set: {{algorithm.name: sft, model.path: "${{sft.model}}", data.train_files: "${{pick.rows}}"}}
  - name: table
    kind: eval
    config: {folder}/base.yaml
    models: {{sft: "${{sft.model}}", again: "${{again.model}}"}}
    data: {{val: {folder}/train.jsonl}}
"""


class Runs:
    """A pipeline whose verbs leave what real ones leave, and note that they ran."""

    def __init__(self, folder: Path) -> None:
        make_model(folder / "model", weights=False)
        write(folder / "train.jsonl", "")
        write(folder / "base.yaml", BASE.format(folder=folder))
        self.file = write(folder / "p.yaml", STAGES.format(folder=folder))
        self.folder, self.called, self.said = folder, list[str](), list[str]()
        self.fails: str | None = None

    def start(self, *overrides: str) -> int:
        self.called, self.said = [], []
        return run_pipeline(load_pipeline(self.file, list(overrides)), self.said.append, self.call)

    def call(self, verb: str, stage: Stage, arguments: list[str]) -> int:
        out = Path(arguments[-1]) if "--out" in arguments else self.folder / "runs" / stage.name
        name = stage.name if verb == "train" else out.name.removeprefix(".").removesuffix(".writing")
        self.called.append(name)
        out.mkdir(parents=True, exist_ok=True)
        if self.fails == name:
            return 75
        if verb == "eval":
            row = {"row": 0, "prompt": "p", "response": "r", "reward": 1.0, "failed": None, "finish_reason": "stop"}
            write(out / "answers.jsonl", json.dumps({**row, "data_source": ""}) + "\n")
            write(out / "metrics.json", '{"val/accuracy": 0.5}')
            return 0
        shutil.copytree(self.folder / "model", out / "final")
        write_headers(out / "final")
        write(out / "status.json", '{"phase": "done"}')
        return 0


ALL = ["sft", "answers", "again", "sft-val", "again-val"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_what_is_done_is_not_run_again(runs: Runs) -> None:
    assert runs.start() == 0 and runs.called == ALL
    assert "| again | val | 0.5 |" in (runs.folder / "runs/table/table.md").read_text()
    rows = (runs.folder / "runs" / TABLE_FILE).read_text().splitlines()
    assert rows == ["stage,model,val accuracy", "table,sft,0.5", "table,again,0.5"]
    (runs.folder / "runs" / TABLE_FILE).unlink()
    assert runs.start() == 0 and runs.called == [] and (runs.folder / "runs" / TABLE_FILE).exists()
    assert runs.said == [f"stage {i} of 4, {n}: is done" for i, n in enumerate(("sft", "pick", "again", "table"), 1)]


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_stage_that_was_stopped_goes_on(runs: Runs, number: int) -> None:
    runs.fails = ALL[number]
    assert runs.start() == 75 and runs.called == ALL[: number + 1]
    assert runs.said[-1].endswith("ended with exit code 75; the same command goes on from here")
    runs.fails = None
    assert runs.start() == 0 and runs.called == ALL[number:]
    assert [line for line in runs.said if "goes on" in line] and not list((runs.folder / "runs").glob("*.1"))


def test_a_changed_setting_runs_that_stage_and_those_that_depend_on_it(runs: Runs) -> None:
    runs.start()
    assert runs.start("pick.rollout.val.temperature=1.0") == 0 and runs.called == ALL[1:]
    told = "\n".join(runs.said)
    assert "sft: is done" in told and "pick: begins again: rollout.val.temperature - -> 1.0" in told
    assert "again: begins again: stage pick" in told and "table: begins again: stage again" in told
    assert (runs.folder / "runs/again.1/final").is_dir()
    assert (
        runs.start("pick.rollout.val.temperature=1.0", "table.rollout.val.temperature=1.0") == 0
        and runs.called == ALL[3:]
    )


def test_changed_data_and_lost_results_run_again(runs: Runs) -> None:
    runs.start()
    write(runs.folder / "train.jsonl", "{}\n")
    assert runs.start() == 0 and runs.called == ALL
    shutil.rmtree(runs.folder / "runs/again/final")
    assert runs.start() == 0 and runs.called == ["again", "sft-val", "again-val"]
    assert "again: begins again: its results are gone" in "\n".join(runs.said)


def test_a_run_that_ended_before_it_was_noted_is_not_run_again(runs: Runs) -> None:
    runs.start()
    file = runs.folder / "runs" / STATE_FILE
    state = json.loads(file.read_text())
    state["sft"]["done"] = False
    file.write_text(json.dumps(state))
    assert runs.start() == 0 and runs.called == []


def test_two_processes_do_not_run_one_pipeline(runs: Runs) -> None:
    def call(verb: str, stage: Stage, arguments: list[str]) -> int:
        with pytest.raises(ConfigError, match="another process runs this pipeline now"):
            runs.start()
        return 75

    assert run_pipeline(load_pipeline(runs.file, []), lambda line: None, call) == 75
