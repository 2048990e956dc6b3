"""Checks of runs on judged rows: what must fit, what has no place there, and what nothing reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.run import RunConfig
from megatron_rl.learning.passes import Models
from megatron_rl.learning.preferences import References
from megatron_rl.trainers.placement import role_plans
from tests.helpers.config import faults, load, make_model, only_fault

DPO, RM = "algorithm.name=dpo", "algorithm.name=reward_model"


def test_the_sequences_of_a_row_must_fit_into_one_forward_pass(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, DPO, "actor.ppo_micro_batch_size_per_gpu=1")
    assert "a row of preferences has 2 sequences" in fault.reason and "use 2 or more" in fault.cure
    load(tmp_path, DPO, "actor.max_tokens_per_gpu=48")
    fault = only_fault(tmp_path, DPO, "actor.max_tokens_per_gpu=47")
    assert fault.key == "actor.max_tokens_per_gpu" and "at least 48" in fault.cure
    # A score is read behind one more token; a scored row is one sequence.
    assert "at least 50" in only_fault(tmp_path, RM, "actor.max_tokens_per_gpu=49").cure
    load(tmp_path, RM, "algorithm.reward_loss=regression", "actor.max_tokens_per_gpu=25")


def test_each_rank_has_a_row(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, DPO, "cluster.n_gpus_per_node=4", "data.train_batch_size=3")
    assert "an optimizer step has 3 rows for 4 data-parallel ranks" in fault.reason


def test_a_reference_belongs_to_losses_that_have_one(tmp_path: Path) -> None:
    other = make_model(tmp_path / "other")
    assert load(tmp_path, DPO, f"ref.path={other}").needs_reference
    for more in ([DPO, "algorithm.loss=simpo"], [RM]):
        fault = only_fault(tmp_path, *more, f"ref.path={other}")
        assert fault.key == "ref.path" and "the loss has no reference model" in fault.reason


def test_lora_has_its_base_as_reference_and_no_place_in_a_reward_model(tmp_path: Path) -> None:
    lora = "model.lora.rank=4"
    plans = role_plans(load(tmp_path, DPO, lora), optimizer_steps=1)
    assert plans["reference"].base_of == "actor"
    assert role_plans(load(tmp_path, DPO), 1)["reference"].base_of is None
    assert set(role_plans(load(tmp_path, DPO, "algorithm.loss=orpo"), 1)) == {"actor"}
    assert "head on a backbone with adapters" in only_fault(tmp_path, RM, lora).reason


@pytest.mark.parametrize(("kind", "head"), [("ForCausalLM", "causal"), ("ForSequenceClassification", "sequence")])
def test_a_reward_model_starts_from_a_language_model_or_a_reward_model(tmp_path: Path, kind: str, head: str) -> None:
    cfg = load(tmp_path, RM)
    config = Path(cfg.model.path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [f"Qwen2{kind}"]}))
    plan = role_plans(load_again(tmp_path, RM), 1)["actor"]
    assert (plan.lm_head, plan.value_head, plan.head_biased, plan.stored_head) == (False, True, False, head)


def load_again(folder: Path, *overrides: str) -> RunConfig:
    """The run, its model folder as it stands."""
    from megatron_rl.config.load import load_config

    own = [f"model.path={folder / 'model'}", f"data.train_files={folder / 'train.jsonl'}"]
    return load_config([], [*own, "data.max_prompt_length=16", "data.max_response_length=8", *overrides])


def test_settings_that_nothing_reads_are_named(tmp_path: Path) -> None:
    def idle(*overrides: str) -> set[str]:
        return {one.key for one in idle_settings(load(tmp_path, *overrides))}

    assert idle(DPO, "data.margin_key=m", "actor.loss_agg_mode=seq-mean-token-sum") == {
        "data.margin_key",
        "actor.loss_agg_mode",
    }
    assert idle(RM, "algorithm.loss.beta=0.3") == {"algorithm.loss.beta"}
    assert "data.label_key" in idle(DPO, "data.label_key=good")
    assert "data.label_key" not in idle(DPO, "algorithm.loss=kto", "data.label_key=good")
    assert "data.chosen_key" in idle("data.chosen_key=best")


def test_kept_sums_of_the_reference_go_into_a_checkpoint_and_back(tmp_path: Path) -> None:
    models = Models(load(tmp_path, DPO))
    first, second = References(models), References(models)
    state = {"train": [[3, -1.25, -2.5], [0, 0.1, 0.2]], "val": [[3, 7.0, 8.0]]}
    first.restore(state)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() == state
