"""Checks that span sections: what is impossible is refused with a cure (R5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.losses import LOSSES
from megatron_rl.config.checks.table import cross_faults
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from tests.helpers.config import faults, load, only_fault


def test_a_right_run_has_no_faults(tmp_path: Path) -> None:
    assert cross_faults(load(tmp_path)) == []


def test_what_is_profiled_exists(tmp_path: Path) -> None:
    """Steps and ranks of the run; both faults at once."""
    wrong = ["trainer.profile.steps=[2,11]", "trainer.profile.ranks=[0,1]", "trainer.total_training_steps=10"]
    found = {fault.key: fault for fault in faults(tmp_path, *wrong)}
    assert found["trainer.profile.steps"].value == [11] and "ends with step 10" in found["trainer.profile.steps"].reason
    assert found["trainer.profile.ranks"].value == [1] and set(found) == {
        "trainer.profile.steps",
        "trainer.profile.ranks",
    }
    load(tmp_path, "trainer.profile.steps=[2]", "trainer.total_training_steps=10")


def test_tp_that_does_not_divide_the_ranks(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.tp=2", "cluster.n_gpus_per_node=3")
    assert fault.key == "actor.tp" and "2 does not divide the 3 ranks" in fault.reason
    assert "one of 1 or 3" in fault.cure and "multiple of 2" in fault.cure


def test_dp_is_what_tensor_parallelism_leaves(tmp_path: Path) -> None:
    cfg = load(tmp_path, "actor.tp=2", "cluster.nnodes=2", "cluster.n_gpus_per_node=4")
    assert (cfg.world_size, cfg.dp_size) == (8, 4)


def test_expert_parallelism_is_refused_without_experts(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.ep=2", "cluster.n_gpus_per_node=2")
    assert fault.key == "actor.ep" and "Qwen2ForCausalLM has none" in fault.reason


def test_r8_interleaving_over_two_stages_is_refused(tmp_path: Path) -> None:
    """R8: Megatron-Core computes wrong gradients there without a word."""
    found = faults(tmp_path, "actor.pp=2", "actor.vpp=2", "cluster.n_gpus_per_node=2")
    (fault,) = (one for one in found if one.key == "actor.vpp")
    assert "wrong gradients" in fault.reason and "3 or more" in fault.cure
    assert any("actor.pp is 1" in one.reason for one in faults(tmp_path, "actor.vpp=2"))


def test_layers_that_do_not_fit_the_stages_are_refused(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.pp=5", "cluster.n_gpus_per_node=5")
    assert fault.key == "actor.pp" and "pipeline stages" in fault.reason
    found = faults(tmp_path, "actor.num_layers_in_first_pipeline_stage=1")
    assert any("there is one stage" in one.reason for one in found)


def test_engines_span_ranks_that_they_divide_and_that_vllm_can_split_over(tmp_path: Path) -> None:
    assert load(tmp_path, "rollout.tp=2", "cluster.n_gpus_per_node=2").rollout.tp == 2
    fault = only_fault(tmp_path, "rollout.tp=2", "cluster.n_gpus_per_node=3")
    assert fault.key == "rollout.tp" and "does not divide the 3 ranks" in fault.reason and "1 or 3" in fault.cure
    fault = only_fault(tmp_path, "rollout.tp=2", "cluster.n_gpus_per_node=2", "rollout.name=hf")
    assert "the engine hf runs on one rank" in fault.reason
    fault = only_fault(tmp_path, "rollout.tp=5", "cluster.n_gpus_per_node=5")
    assert "the engine vllm cannot split" in fault.reason


def test_engine_keywords_that_would_change_the_layout_are_refused(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "rollout.engine_kwargs.tensor_parallel_size=2")
    assert fault.key == "rollout.engine_kwargs.tensor_parallel_size" and "rollout.tp" in fault.cure


def test_ppo_gae_and_a_critic_come_together(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "critic.enable=true")
    assert fault.key == "critic.enable" and "algorithm.name grpo has no use for a critic" in fault.reason
    fault = only_fault(tmp_path, "algorithm.adv_estimator=gae")
    assert fault.key == "algorithm.adv_estimator" and "needs a critic" in fault.reason
    fault = only_fault(tmp_path, "algorithm.name=ppo", "algorithm.adv_estimator=gae")
    assert fault.key == "critic.enable" and "no critic is trained" in fault.reason
    fault = only_fault(tmp_path, "algorithm.name=ppo", "critic.enable=true")
    assert fault.key == "algorithm.adv_estimator" and "set algorithm.adv_estimator=gae" in fault.cure
    ppo = ("algorithm.name=ppo", "critic.enable=true", "algorithm.adv_estimator=gae", "rollout.n=1")
    assert load(tmp_path, *ppo).critic_training.epochs == 1
    fault = only_fault(tmp_path, *ppo, "critic.tp=2")
    assert fault.key == "critic.tp" and "actor.tp is 1" in fault.reason
    found = faults(tmp_path, *ppo, "critic.share_backbone=true", "critic.ppo_epochs=2", "trainer.critic_warmup=3")
    assert [fault.key for fault in found] == ["critic.ppo_epochs", "trainer.critic_warmup"]


def test_mini_batch_that_does_not_divide_the_batch(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "data.train_batch_size=64", "actor.ppo_mini_batch_size=24")
    assert fault.key == "actor.ppo_mini_batch_size" and "does not divide data.train_batch_size 64" in fault.reason
    assert "8 or 16" in fault.cure


def test_mini_batch_larger_than_the_batch(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "data.train_batch_size=64", "actor.ppo_mini_batch_size=128")
    assert "more than data.train_batch_size 64" in fault.reason and "multiple of 128" in fault.cure


def test_ranks_without_a_sequence_are_refused(tmp_path: Path) -> None:
    many = "cluster.n_gpus_per_node=32"
    fault = only_fault(tmp_path, many, "actor.ppo_mini_batch_size=2", "data.train_batch_size=8")
    assert fault.key == "actor.ppo_mini_batch_size" and "16 sequences for 32 data-parallel ranks" in fault.reason
    assert "at least 4" in fault.cure
    assert only_fault(tmp_path, many, "data.train_batch_size=2").key == "data.train_batch_size"


def test_token_budget_below_the_longest_sequence(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.max_tokens_per_gpu=23")
    assert fault.key == "actor.max_tokens_per_gpu" and "24 (data.max_prompt_length 16 + " in fault.reason
    assert "at least 24" in fault.cure
    load(tmp_path, "actor.max_tokens_per_gpu=24")


def test_max_model_len_below_prompt_plus_response_is_never_a_cut(tmp_path: Path) -> None:
    """R6"""
    fault = only_fault(tmp_path, "rollout.max_model_len=23")
    assert fault.key == "rollout.max_model_len" and "would cut responses" in fault.reason
    load(tmp_path, "rollout.max_model_len=24")


def test_grpo_needs_two_samples_of_a_prompt(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "rollout.n=1")
    assert fault.key == "rollout.n" and "nothing to compare with" in fault.reason
    assert load(tmp_path, "rollout.n=1", "algorithm.name=sft").samples_per_prompt == 1


def test_truncated_sampling_is_refused_for_training_and_free_for_validation(tmp_path: Path) -> None:
    """N7"""
    assert only_fault(tmp_path, "rollout.top_p=0.9").key == "rollout.top_p"
    assert only_fault(tmp_path, "rollout.top_k=50").key == "rollout.top_k"
    load(tmp_path, "rollout.val.top_p=0.9", "rollout.val.top_k=50")


def test_several_greedy_validation_samples_are_refused(tmp_path: Path) -> None:
    """vLLM refuses them in its first validation, after all the steps where that comes last."""
    val = f"data.val_files={tmp_path / 'train.jsonl'}"
    fault = only_fault(tmp_path, val, "rollout.val.n=4")
    assert fault.key == "rollout.val.n" and "greedy" in fault.reason and "rollout.val.temperature=1.0" in fault.cure
    load(tmp_path, val, "rollout.val.n=4", "rollout.val.temperature=1.0")
    load(tmp_path, val, "rollout.val.n=1")
    load(tmp_path, val, "rollout.val.n=4", "algorithm.name=sft")


def test_sft_ignores_the_settings_of_generation(tmp_path: Path) -> None:
    load(tmp_path, "algorithm.name=sft", "rollout.top_p=0.9", "rollout.max_model_len=1", "reward.function=none")


def test_weights_gathered_late_need_parts_and_buckets(tmp_path: Path) -> None:
    """R8: every missing setting is named."""
    fault = only_fault(tmp_path, "actor.overlap_param_gather=true")
    assert fault.key == "actor.overlap_param_gather" and "actor.overlap_grad_reduce is off" in fault.reason
    both = ("actor.overlap_param_gather=true", "actor.overlap_grad_reduce=true")
    fault = only_fault(tmp_path, *both, "actor.use_distributed_optimizer=false")
    assert "actor.use_distributed_optimizer is off" in fault.reason and "nothing to gather" in fault.reason
    assert load(tmp_path, *both, "cluster.n_gpus_per_node=2").actor.overlap_param_gather


def test_overlap_does_not_go_with_interleaved_chunks(tmp_path: Path) -> None:
    """R8"""
    found = faults(tmp_path, "actor.pp=4", "actor.vpp=2", "cluster.n_gpus_per_node=8", "actor.overlap_grad_reduce=true")
    assert any(one.key == "actor.overlap_grad_reduce" and "actor.vpp=2" in one.reason for one in found)


def test_sequence_parallel_needs_tensor_parallel_ranks(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.sequence_parallel=true")
    assert fault.key == "actor.sequence_parallel" and "actor.tp is 1" in fault.reason
    load(tmp_path, "actor.sequence_parallel=true", "actor.tp=2", "cluster.n_gpus_per_node=2")


def test_inline_backend_has_one_rank(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "cluster.backend=inline", "cluster.n_gpus_per_node=2")
    assert fault.key == "cluster.backend" and "one rank in this process" in fault.reason


def test_ray_settings_that_cannot_take_effect(tmp_path: Path) -> None:
    assert only_fault(tmp_path, "cluster.backend=inline", "cluster.ray_port=6379").key == "cluster.ray_port"
    fault = only_fault(tmp_path, "cluster.ray_address=10.0.0.1:6379", "cluster.ray_port=6379")
    assert fault.key == "cluster.ray_port" and "joins a running one" in fault.reason


def test_tensor_parallel_groups_lie_on_one_node(tmp_path: Path) -> None:
    for key in ("actor.tp=2", "rollout.tp=2"):
        fault = only_fault(tmp_path, "cluster.nnodes=2", key)
        assert f"{fault.key}={fault.value}" == key and "does not divide the 1 ranks of a node" in fault.reason
        assert "use a divisor of 1 (1)" in fault.cure and "cluster.tp_across_nodes=true" in fault.cure
        load(tmp_path, "cluster.nnodes=2", key, "cluster.tp_across_nodes=true")
        load(tmp_path, "cluster.nnodes=2", "cluster.n_gpus_per_node=2", key)
    load(tmp_path, "cluster.nnodes=2", "rollout.tp=2", "algorithm.name=sft")


@pytest.mark.parametrize("key", ["tp_across_nodes=true", "network_interface=ib0"])
def test_keys_of_several_nodes_on_one(tmp_path: Path, key: str) -> None:
    fault = only_fault(tmp_path, f"cluster.{key}")
    assert fault.key == f"cluster.{key.partition('=')[0]}" and "cluster.nnodes is 1" in fault.reason
    load(tmp_path, f"cluster.{key}", "cluster.nnodes=2")


def test_target_loss_belongs_to_sft(tmp_path: Path) -> None:
    assert only_fault(tmp_path, "trainer.target_loss=0.25").key == "trainer.target_loss"
    load(tmp_path, "trainer.target_loss=0.25", "algorithm.name=sft")


def test_validation_without_files(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "trainer.test_freq=5")
    assert fault.key == "trainer.test_freq" and "data.val_files is empty" in fault.reason
    load(tmp_path, "trainer.test_freq=5", f"data.val_files={tmp_path / 'train.jsonl'}")


def test_a_reference_that_nothing_reads(tmp_path: Path) -> None:
    reference = f"ref.path={tmp_path / 'model'}"
    fault = only_fault(tmp_path, reference)
    assert fault.key == "ref.path" and "nothing in this run reads the reference" in fault.reason
    assert load(tmp_path, reference, "actor.use_kl_loss=true").needs_reference
    assert load(tmp_path, reference, "algorithm.use_kl_in_reward=true").needs_reference
    assert only_fault(tmp_path, reference, "actor.use_kl_loss=true", "algorithm.name=sft").key == "ref.path"


def test_unknown_estimator_and_loss_list_what_is_known(tmp_path: Path) -> None:
    found = faults(tmp_path, "algorithm.adv_estimator=rlo", "actor.loss_mode=ppoclip")
    assert [(fault.key, fault.cure) for fault in found] == [
        ("actor.loss_mode", f"did you mean ppo_clip? choices: {', '.join(LOSSES)}"),
        ("algorithm.adv_estimator", f"did you mean rloo? choices: {', '.join(ESTIMATORS)}"),
    ]


def test_learning_rate_schedules_that_contradict_themselves(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.optim.lr_warmup_steps=10", "actor.optim.lr_decay_steps=10")
    assert fault.key == "actor.optim.lr_decay_steps"
    fault = only_fault(tmp_path, "actor.optim.lr_warmup_steps=11", "trainer.total_training_steps=10")
    assert fault.key == "actor.optim.lr_warmup_steps" and "10 optimizer steps" in fault.reason
    load(tmp_path, "actor.optim.lr_warmup_steps=11", "trainer.total_training_steps=10", "actor.ppo_epochs=2")


def test_missing_and_empty_data_files_are_named_with_their_place_in_the_list(tmp_path: Path) -> None:
    good = tmp_path / "train.jsonl"
    found = faults(tmp_path, f"data.train_files=[{good},absent.parquet,{tmp_path}]", "data.val_files=absent.jsonl")
    assert [(fault.key, fault.value, fault.reason.partition(" [")[0]) for fault in found] == [
        ("data.train_files[1]", "absent.parquet", "there is no such file"),
        ("data.train_files[2]", str(tmp_path), "this folder has no state.json of a saved data set"),
        ("data.val_files", "absent.jsonl", "there is no such file"),
    ]
    assert only_fault(tmp_path, "data.train_files=[]").reason.startswith("is empty")


def test_an_unknown_reward_lists_names_and_forms(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "reward.function=exactmatch")
    assert fault.cure.startswith("did you mean exact_match? known: code, exact_match, format, math, numeric,")
    assert only_fault(tmp_path, "reward.function=:f").reason.startswith("does not name a place")


def test_a_reward_file_must_exist_parse_and_define_the_function(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    setting = f"reward.function={file}:compute_score"
    assert "there is no file" in only_fault(tmp_path, setting).reason
    file.write_text("def compute_scores(solution_str):\n    return 1.0\n")
    fault = only_fault(tmp_path, setting)
    assert "does not define compute_score" in fault.reason and f"did you mean {file}:compute_scores" in fault.cure
    file.write_text("def compute_score(:\n")
    assert "not valid Python" in only_fault(tmp_path, setting).reason
    for text in (
        "def compute_score(solution_str): ...\n",
        "from math import sqrt as compute_score\n",
        "from x import *\n",
    ):
        file.write_text(text)
        assert load(tmp_path, setting).reward.function == f"{file}:compute_score"


def test_a_reward_module_is_not_imported_by_the_config(tmp_path: Path) -> None:
    assert load(tmp_path, "reward.function=some.module:f").reward.function == "some.module:f"


@settings(deadline=None)
@given(
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 8),
    tp=st.integers(1, 8),
    batch=st.integers(1, 64),
    mini=st.none() | st.integers(1, 64),
)
def test_a_run_without_faults_of_layout_has_whole_numbers(
    nodes: int, per_node: int, tp: int, batch: int, mini: int | None
) -> None:
    cfg = RunConfig(
        model=ModelConfig(path=""),
        data=DataConfig(train_files=[], train_batch_size=batch),
        actor=ActorConfig(tp=tp, ppo_mini_batch_size=mini),
        cluster=ClusterConfig(nnodes=nodes, n_gpus_per_node=per_node),
    )
    wrong = {fault.key for fault in cross_faults(cfg)}
    assert ("actor.tp" not in wrong) == ((per_node if nodes > 1 else nodes * per_node) % tp == 0)
    if not wrong & {"actor.tp", "actor.ppo_mini_batch_size", "data.train_batch_size"}:
        assert cfg.dp_size * tp == cfg.world_size
        assert cfg.data.train_batch_size % cfg.mini_batch_size == 0
        assert cfg.mini_batch_size * cfg.rollout.n >= cfg.dp_size


def test_samples_of_older_weights_are_not_offered_yet(tmp_path: Path) -> None:
    assert load(tmp_path, "trainer.max_staleness=0").trainer.max_staleness == 0
    fault = only_fault(tmp_path, "trainer.max_staleness=1")
    assert fault.key == "trainer.max_staleness" and "not offered yet" in fault.reason and "set it to 0" in fault.cure
