"""Checks of keys that concern experts: their replay, their balancing loss, and engines that deal them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.config import QWEN3_MOE, load, make_model, only_fault


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"model.path={make_model(tmp_path / 'experts', **QWEN3_MOE)}"


def test_what_concerns_experts_is_refused_for_a_model_without(tmp_path: Path) -> None:
    for setting in ("actor.router_replay=old", "actor.router_aux_loss_coef=0.01"):
        fault = only_fault(tmp_path, setting)
        assert fault.key == setting.partition("=")[0] and "has none" in fault.reason
    load(tmp_path, "actor.router_replay=off", "actor.router_aux_loss_coef=0")


def test_a_replay_of_rollouts_needs_an_engine_that_returns_its_experts(tmp_path: Path, model: str) -> None:
    replay = (model, "actor.router_replay=rollout")
    assert load(tmp_path, *replay, "rollout.name=hf").actor.router_replay == "rollout"
    assert load(tmp_path, *replay, "cluster.device=cuda").actor.router_replay == "rollout"
    fault = only_fault(tmp_path, *replay, "cluster.device=cpu")
    assert fault.key == "actor.router_replay" and "CPU build" in fault.reason and "rollout.name=hf" in fault.cure
    assert "does not return" in only_fault(tmp_path, *replay, "rollout.name=fake").reason
    fault = only_fault(tmp_path, model, "actor.router_replay=old", "algorithm.name=sft")
    assert fault.key == "actor.router_replay" and "has none" in fault.reason


def test_experts_are_dealt_to_the_ranks_of_one_engine(tmp_path: Path, model: str) -> None:
    two = (model, "cluster.n_gpus_per_node=2", "rollout.tp=2")
    assert load(tmp_path, *two, "rollout.ep=2").rollout.ep == 2
    fault = only_fault(tmp_path, *two, "rollout.ep=4")
    assert fault.key == "rollout.ep" and "rollout.tp=4" in fault.cure
    fault = only_fault(tmp_path, *two, "rollout.ep=2", "cluster.device=cpu")
    assert fault.key == "rollout.ep" and "CPU build" in fault.reason
    fault = only_fault(tmp_path, model, "rollout.name=hf", "rollout.ep=2")
    assert "deals no experts" in fault.reason
    fault = only_fault(tmp_path, *two, "rollout.engine_kwargs.enable_expert_parallel=true")
    assert fault.cure.endswith("rollout.ep")
