"""What may differ between a checkpoint's config and that of the run that goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.config.changes import FREE, LEARNED, covers, differences, refused
from megatron_rl.config.load import run_schema, to_dict
from tests.helpers.config import load, only_fault


def test_every_key_of_the_config_is_in_the_table_once() -> None:
    keys = list(run_schema().keys)
    assert [key for key in keys if covers(FREE, key) == covers(LEARNED, key)] == []
    assert [name for name in (*FREE, *LEARNED) if not any(covers((name,), key) for key in keys)] == [], "stale"


def test_what_differs_is_named_with_both_values_in_the_order_of_the_schema(tmp_path: Path) -> None:
    saved = json.loads(json.dumps(to_dict(load(tmp_path))))
    cfg = load(tmp_path, "actor.loss=sapo", "trainer.seed=3", "actor.optim.lr=1e-5", "cluster.nnodes=2")
    unlike = differences(saved, cfg)
    assert [str(one) for one in unlike] == [
        "actor.optim.lr was 1e-06 and is 1e-05",
        "actor.loss.type was 'ppo_clip' and is 'sapo'",
        "trainer.seed was 0 and is 3",
        "cluster.nnodes was 1 and is 2",
    ]
    faults = refused(unlike, ["trainer.seed"])
    assert [fault.key for fault in faults] == ["actor.optim.lr", "actor.loss.type"]
    assert faults[0].cure == "set it back, or add actor.optim.lr to trainer.resume_changes"
    assert refused(unlike, ["actor.optim.lr", "actor.loss_mode", "trainer.seed"]) == [], "verl's name is one too"


def test_an_equal_config_has_no_differences_and_a_key_that_came_later_had_its_default(tmp_path: Path) -> None:
    saved = json.loads(json.dumps(to_dict(load(tmp_path, "data.mix_weights={a: 2, b: 1.5}"))))
    assert differences(saved, load(tmp_path, "data.mix_weights={a: 2, b: 1.5}")) == []
    del saved["checkpoint"], saved["trainer"]["seed"]
    assert differences(saved, load(tmp_path, "data.mix_weights={a: 2, b: 1.5}")) == []


@pytest.mark.parametrize("make", ["nothing", "empty", "run of another program"])
def test_a_path_that_is_no_checkpoint_is_a_fault_of_the_config(tmp_path: Path, make: str) -> None:
    path = tmp_path / "there"
    if make != "nothing":
        path.mkdir()
    if make == "run of another program":
        (path / "global_step_10").mkdir()
    fault = only_fault(tmp_path, f"trainer.resume_mode={path}")
    assert fault.key == "trainer.resume_mode" and "RUN/checkpoints/step_" in fault.cure


def test_a_key_that_is_none_cannot_be_allowed(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "trainer.resume_changes=[actor.optim.lrr]")
    assert fault.value == "actor.optim.lrr" and "did you mean actor.optim.lr" in fault.cure
