"""The file of a pipeline: settings, references, and every fault at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.pipeline.spec import is_pipeline, read_pipeline
from tests.helpers.config import write

TWO = """
folder: runs/two
set: {cluster: {device: cpu}}
stages:
  - name: first
    kind: sft
    config: a.yaml
    set: {actor.optim.lr: 1e-6, trainer: {total_training_steps: 3}, data.train_files: [x, y]}
  - {name: second, kind: grpo, config: [b.yaml, c.yaml], set: ["model.path=${first.model}"]}
"""


def faults_of(tmp_path: Path, stages: str) -> list[str]:
    indented = "\n".join(f"  {line}" for line in stages.strip().splitlines())
    return [str(one) for one in read_pipeline(write(tmp_path / "p.yaml", f"folder: runs/p\nstages:\n{indented}\n"))[1]]


def test_settings_come_from_the_pipeline_then_the_stage_then_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", TWO)
    pipeline, faults = read_pipeline(file, ["first.trainer.seed=1", "model.dtype=float32"])
    assert faults == [] and is_pipeline(file) and not is_pipeline(write(tmp_path / "c.yaml", "model: {path: x}"))
    first, second = pipeline.stages
    own = ("actor.optim.lr=1e-06", "trainer.total_training_steps=3", 'data.train_files=["x", "y"]')
    assert first.settings == ('cluster.device="cpu"', *own, "model.dtype=float32", "trainer.seed=1")
    assert second.config == ("b.yaml", "c.yaml") and second.references() == ["first.model"]
    ((name, overrides),) = second.runs(pipeline.fill(pipeline.path_of))
    assert name == "second" and "model.path=runs/two/first/final" in overrides


def test_an_eval_has_a_run_for_each_model_and_data_set(tmp_path: Path) -> None:
    text = TWO + "  - {name: t, kind: eval, config: c, models: {a: '${first.model}', b: m}, data: {x: [v, w], y: z}}\n"
    pipeline, faults = read_pipeline(write(tmp_path / "p.yaml", text))
    runs = dict(pipeline.stages[2].runs(pipeline.fill(pipeline.path_of)))
    assert faults == [] and list(runs) == ["a-x", "a-y", "b-x", "b-y"]
    assert runs["a-x"][-2:] == ["model.path=runs/two/first/final", 'data.val_files=["v", "w"]']


@pytest.mark.parametrize(
    ("set_of_first", "words"),
    [
        ("model.path: '${second.model}'", "first: '${second.model}' -- second does not come before this stage"),
        ("model.path: '${first.model}'", "first: '${first.model}' -- first does not come before this stage"),
        ("model.path: '${other.model}'", "first: '${other.model}' -- other is no stage"),
        ("trainer.resume_mode: disable", "first: trainer.resume_mode: 'set' -- a stage goes on from its own"),
    ],
)
def test_references_lead_back_and_keys_of_the_pipeline_are_its_own(
    tmp_path: Path, set_of_first: str, words: str
) -> None:
    stages = (
        f"- {{name: first, kind: sft, config: a, set: {{{set_of_first}}}}}\n- {{name: second, kind: sft, config: b}}"
    )
    (fault,) = faults_of(tmp_path, stages)
    assert fault.startswith(words)


def test_artefacts_that_a_kind_does_not_make_are_faults(tmp_path: Path) -> None:
    stages = (
        "- {name: a, kind: sft, config: c}\n- {name: b, kind: sft, config: c, set: {data.train_files: '${a.rows}'}}"
    )
    (fault,) = faults_of(tmp_path, stages)
    assert fault.startswith("b: '${a.rows}' -- a is of kind sft, which makes model")


def test_all_faults_of_form_come_at_once(tmp_path: Path) -> None:
    stages = """
- {name: reward, kind: sft, config: c}
- {name: a, kind: sftt}
- {name: b, kind: sample, config: c, keep: all, least: high, models: {x: y}}
- {name: b, kind: eval, config: c, set: 3, models: [x]}
- text
"""
    faults = faults_of(tmp_path, stages)
    for words in (
        "stages[0].name: 'reward' -- is no name of a stage",
        "stages[1].kind: 'sftt' -- is no kind of stage",
        "a: config: None -- names no config file",
        "b: models: {'x': 'y'} -- is no key of a stage of kind sample",
        "b: keep: 'all' -- is neither right nor best",
        "b: least: 'high' -- is no number",
        "b: set: 3 -- is neither a mapping nor a list",
        "b: models: ['x'] -- is no mapping of names to paths",
        "b: data: None -- is no mapping of names to paths",
        "stages[4]: 'text' -- is no mapping",
        "b: 2 -- stages have this name",
    ):
        assert [fault for fault in faults if fault.startswith(words)], (words, faults)
    assert len(faults) == 11


def test_a_file_without_stages_and_a_key_that_stands_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stages: None -- is no list of stages"):
        read_pipeline(write(tmp_path / "p.yaml", "folder: x\n"))
    twice = "folder: x\nstages:\n  - {name: a, kind: sft, config: c, set: {trainer.seed: 1, trainer.seed: 2}}\n"
    faults = read_pipeline(write(tmp_path / "p.yaml", twice))[1]
    assert ["stands 2 times" in str(fault) for fault in faults] == [True]
