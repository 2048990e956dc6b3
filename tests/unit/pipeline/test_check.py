"""Configs of all stages are checked before anything starts, with models that no stage has made yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.errors import ConfigError
from megatron_rl.pipeline.check import load_pipeline
from tests.helpers.config import make_model, write

BASE = """
model: {{path: {folder}/model}}
data:
  train_files: {folder}/train.jsonl
  val_files: {folder}/train.jsonl
  max_prompt_length: 16
  max_response_length: 8
cluster: {{device: cpu}}
"""
STAGES = """
folder: {folder}/runs
stages:
  - {{name: sft, kind: sft, config: {folder}/base.yaml, set: {{algorithm.name: sft, model.init: random}}}}
  - name: rm
    kind: reward_model
    config: {folder}/base.yaml
    set: {{algorithm.name: reward_model, model.path: "${{sft.model}}"}}
  - name: grpo
    kind: grpo
    config: {folder}/base.yaml
    set: {{model.path: "${{sft.model}}", reward.function: model, reward.model.path: "${{rm.model}}"}}
  - name: pick
    kind: sample
    config: {folder}/base.yaml
    set: {{model.path: "${{grpo.model}}", reward.function: exact_match}}
  - name: again
    kind: sft
    config: {folder}/base.yaml
    set: {{algorithm.name: sft, model.path: "${{grpo.model}}", data.train_files: "${{pick.rows}}"}}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    make_model(tmp_path / "model", weights=False)
    write(tmp_path / "train.jsonl", "")
    write(tmp_path / "base.yaml", BASE.format(folder=tmp_path))
    return write(tmp_path / "p.yaml", STAGES.format(folder=tmp_path))


def faults_of(pipeline: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(pipeline, list(overrides))
    return [str(fault) for fault in caught.value.faults]


def test_a_right_pipeline_is_checked_and_nothing_is_written(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["check", pipeline]) == 0
    out = capsys.readouterr().out
    assert f"grpo: grpo, {tmp_path}/base.yaml from sft.model, rm.model -> {tmp_path}/runs/grpo" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_faults_of_all_stages_come_at_once_and_name_their_stage(pipeline: str) -> None:
    faults = faults_of(pipeline, "sft.actor.optim.lr=-1", "grpo.actor.tp=3", "again.trainer.sed=1")
    assert [fault.split(":")[0] for fault in faults if "actor.optim.lr: -1" in fault] == ["sft"]
    assert [fault.split(":")[0] for fault in faults if "trainer.sed" in fault] == ["again"]
    assert {fault.split(":")[0] for fault in faults} == {"sft", "grpo", "again"}


def test_a_model_that_is_not_made_yet_has_its_sources_shape(pipeline: str) -> None:
    """4 attention heads do not divide by 8 ranks."""
    faults = faults_of(pipeline, "grpo.cluster.n_gpus_per_node=8", "grpo.actor.tp=8", "grpo.rollout.tp=1")
    assert [fault for fault in faults if fault.startswith("grpo: actor.tp: 8") and "4" in fault], faults
    (fault,) = faults_of(pipeline, "again.model.path=${grpo.model}/none")
    assert "${grpo.model}" in fault and "megatron-rl-check-" not in fault


def test_the_source_that_is_missing_is_said_once(pipeline: str, tmp_path: Path) -> None:
    (fault,) = faults_of(pipeline, f"sft.model.path={tmp_path}/none")
    assert fault.startswith(f"sft: model.path: '{tmp_path}/none' -- there is no such folder")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("again.algorithm.name=reward_model", "again: algorithm.name: 'reward_model' -- the stage is of kind sft"),
        ("pick.algorithm.name=sft", "pick: algorithm.name: 'sft' -- a stage that samples needs"),
        ("grpo.trainer.save_freq=0", "grpo: trainer.save_freq: 0 -- a later stage reads the model, and none is saved"),
        ("grpo.model.lora.rank=4", "grpo: model.lora.save: 'adapter' -- a later stage reads the model"),
    ],
)
def test_a_stage_is_of_its_kind_and_makes_what_others_read(pipeline: str, override: str, words: str) -> None:
    assert [fault for fault in faults_of(pipeline, override) if fault.startswith(words)]


def test_a_reward_model_stands_in_as_a_classifier(pipeline: str) -> None:
    faults = faults_of(pipeline, "grpo.reward.model.path='${sft.model}'")
    assert len(faults) == 2 and all(fault.startswith("grpo: reward.model.path: '${sft.model}'") for fault in faults)


def test_run_wants_one_file(pipeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", pipeline, pipeline]) == 2
    assert "is not one file" in capsys.readouterr().err
