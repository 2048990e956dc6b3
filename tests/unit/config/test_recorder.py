"""The keys that a check reads are recorded while it runs, and a check that reads a wrong key says nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.checks import model, table
from megatron_rl.config.checks.recorder import Recorder, recorded
from megatron_rl.config.checks.table import CHECKS, Check, run_check
from megatron_rl.config.load import run_schema
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.errors import Fault
from tests.helpers.config import faults, load

PPO = ("algorithm.name=ppo", "critic.enable=true", "algorithm.adv_estimator=gae")


def reads(check: Callable[[RunConfig], object], cfg: RunConfig) -> frozenset[str]:
    def run(view: RunConfig) -> list[Fault]:
        check(view)
        return []

    return recorded(run, cfg)[1]


@pytest.mark.parametrize(
    "overrides",
    [(), PPO, ("algorithm.name=sft",), ("actor.use_kl_loss=true", "actor.tp=2", "cluster.n_gpus_per_node=2")],
)
def test_every_check_reads_keys_that_exist(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    cfg, models = load(tmp_path, *overrides), model.ModelShapes()
    for check in CHECKS:
        keys = run_check(check, cfg, models)[1]
        assert keys and keys <= set(run_schema().keys), check


def test_properties_methods_and_nested_sections_are_recorded(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    assert reads(lambda run: run.world_size, cfg) == {"cluster.nnodes", "cluster.n_gpus_per_node"}
    assert reads(lambda run: run.max_sequence_length, cfg) == {"data.max_prompt_length", "data.max_response_length"}
    assert reads(lambda run: run.actor.optim.warmup_steps(4), cfg) == {
        "actor.optim.lr_warmup_steps",
        "actor.optim.lr_warmup_steps_ratio",
    }
    assert reads(lambda run: run.actor.expert_tp, cfg) == {"actor.etp", "actor.ep", "actor.tp"}
    assert reads(lambda run: run.needs.critic, cfg) == {"algorithm.name"}
    assert reads(lambda run: run.engine.multi_rank, cfg) == {"rollout.name"}
    assert reads(lambda run: run.critic, cfg) == frozenset()


def test_a_view_is_its_section_with_the_same_values(tmp_path: Path) -> None:
    cfg = load(tmp_path, "actor.tp=2", "cluster.n_gpus_per_node=2")
    view = Recorder().view(cfg)
    assert isinstance(view, RunConfig) and isinstance(view.actor, ActorConfig)
    assert (view.actor.tp, view.dp_size, view.data.train_files) == (2, 1, cfg.data.train_files)
    assert dataclasses.replace(view.actor, tp=4) == dataclasses.replace(cfg.actor, tp=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.actor.tp = 3  # type: ignore[misc]


def test_replaced_sections_and_views_of_roles_are_read_from_their_own_keys(tmp_path: Path) -> None:
    cfg = load(tmp_path, *PPO, "critic.max_tokens_per_gpu=64")
    keys = reads(lambda run: run.critic_training, cfg)
    assert {"critic.max_tokens_per_gpu", "critic.ppo_epochs", "critic.loss_agg_mode", "actor.tp"} <= keys
    assert not {key for key in keys if not key.startswith(("actor.", "critic.", "algorithm.", "data."))}
    keys = reads(lambda run: dataclasses.replace(run.algorithm.kl_ctrl, kl_coef=1.0), cfg)
    assert {key.rpartition(".")[0] for key in keys} == {"algorithm.kl_ctrl"}


def _reads_what_no_list_says(cfg: RunConfig) -> list[Fault]:
    limit = cfg.reward.timeout_s
    return [Fault("rollout.n", cfg.rollout.n, f"is checked against reward.timeout_s {limit}", "")]


def test_a_check_that_reads_a_wrong_key_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load(tmp_path)
    monkeypatch.setattr(table, "CHECKS", (Check(_reads_what_no_list_says),))
    assert [fault.key for fault in table.cross_faults(cfg)] == ["rollout.n"]
    assert table.cross_faults(cfg, frozenset({"reward.timeout_s"})) == []
    assert [fault.key for fault in table.cross_faults(cfg, frozenset({"reward.num_workers"}))] == ["rollout.n"]


def test_a_wrong_key_hides_only_the_checks_that_come_to_read_it(tmp_path: Path) -> None:
    """actor.etp is read with experts only, cp by the token budget: each wrong value leaves the other checks at work."""
    wrong = faults(tmp_path, "actor.etp=0", "rollout.top_k=5", "actor.max_tokens_per_gpu=1", "rollout.top_p=0.5")
    assert {fault.key for fault in wrong} == {"actor.etp", "rollout.top_k", "actor.max_tokens_per_gpu", "rollout.top_p"}
    wrong = faults(tmp_path, "actor.cp=0", "rollout.top_k=5", "actor.max_tokens_per_gpu=1", "rollout.top_p=0.5")
    assert {fault.key for fault in wrong} == {"actor.cp", "rollout.top_k", "rollout.top_p"}


def test_a_models_config_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load(tmp_path)
    opened: list[str] = []
    inspect = model.inspect_model
    monkeypatch.setattr(model, "inspect_model", lambda path, *args: (opened.append(path), inspect(path, *args))[1])
    assert table.cross_faults(cfg) == []
    assert opened == [cfg.model.path]
