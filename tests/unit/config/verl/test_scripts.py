"""Argument lists in the form of verl's documentation pass, and mean here what they mean there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.algos.losses.base import ClipRange
from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.load import Resolved, resolve
from megatron_rl.config.verl import rules
from tests.helpers.config import make_model, write

A, R, M, F = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.model.",
    "actor_rollout_ref.ref.",
)
T = f"+{A}megatron.override_transformer_config."

MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
}


def data(folder: Path, model: str) -> list[str]:
    path = make_model(folder / "model", max_position_embeddings=40960, num_hidden_layers=8, **MODELS[model])
    rows = [write(folder / f"{name}.parquet", "") for name in ("gsm8k", "math", "test")]
    return [
        f"data.train_files=['{rows[0]}', '{rows[1]}']",
        f"data.val_files=['{rows[2]}']",
        f"{M}path={path}",
        f"critic.model.path={path}",
        "data.train_batch_size=1024",
        "data.max_prompt_length=1024",
        "data.max_response_length=2048",
        "data.filter_overlong_prompts=True",
        "data.truncation='error'",
        "data.trust_remote_code=True",
    ]


COMMON = [
    f"{M}use_remove_padding=True",
    f"{M}enable_gradient_checkpointing=True",
    f"{M}trust_remote_code=True",
    f"{M}use_shm=True",
    f"{A}optim.lr=1e-6",
    f"{A}ppo_mini_batch_size=256",
    f"{A}use_dynamic_bsz=True",
    f"{A}ppo_max_token_len_per_gpu=24576",
    f"{A}entropy_coeff=0",
    f"{R}name=vllm",
    f"{R}mode=async",
    f"{R}tensor_model_parallel_size=2",
    f"{R}gpu_memory_utilization=0.6",
    f"{R}enforce_eager=False",
    f"{R}free_cache_engine=True",
    f"{R}log_prob_use_dynamic_bsz=True",
    f"{R}log_prob_max_token_len_per_gpu=24576",
    f"{R}val_kwargs.do_sample=True",
    f"{R}val_kwargs.temperature=1.0",
    f"{R}val_kwargs.top_p=0.7",
    f"{R}val_kwargs.n=4",
    f"{F}log_prob_micro_batch_size_per_gpu=4",
    "trainer.balance_batch=True",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name=verl_examples",
    "trainer.experiment_name=gsm8k",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
    "trainer.resume_mode=auto",
    "trainer.log_val_generations=10",
    "trainer.max_actor_ckpt_to_keep=3",
    "ray_kwargs.ray_init.runtime_env.py_executable=null",
    "hydra.run.dir=outputs",
]

BACKENDS: dict[str, list[str]] = {
    "fsdp": [
        f"{A}strategy=fsdp2",
        f"{A}fsdp_config.param_offload=False",
        f"{A}fsdp_config.optimizer_offload=False",
        f"{A}fsdp_config.fsdp_size=-1",
        f"{A}fsdp_config.reshard_after_forward=True",
        f"{A}fsdp_config.forward_prefetch=True",
        f"{A}fsdp_config.model_dtype=bf16",
        f"{A}ulysses_sequence_parallel_size=2",
        f"{F}strategy=fsdp2",
        f"{F}fsdp_config.param_offload=True",
        f"{F}ulysses_sequence_parallel_size=2",
        "critic.strategy=fsdp2",
        "critic.fsdp.param_offload=False",
        "critic.model.fsdp_config.optimizer_offload=False",
        "actor_rollout_ref.nccl_timeout=7200",
    ],
    "megatron": [
        "model_engine=megatron",
        f"{A}megatron.tensor_model_parallel_size=2",
        f"{A}megatron.pipeline_model_parallel_size=4",
        f"{A}megatron.use_mbridge=True",
        f"{A}megatron.use_dist_checkpointing=False",
        f"{A}megatron.grad_offload=True",
        f"{F}megatron.tensor_model_parallel_size=2",
        f"{F}megatron.pipeline_model_parallel_size=4",
        f"{F}megatron.param_offload=True",
        "critic.megatron.tensor_model_parallel_size=2",
        "critic.megatron.pipeline_model_parallel_size=4",
        f"{T}recompute_granularity=full",
        f"{T}recompute_method=uniform",
        f"{T}recompute_num_layers=1",
        f"{T}num_layers_in_first_pipeline_stage=1",
        f"{T}num_layers_in_last_pipeline_stage=1",
        f"{T}apply_rope_fusion=True",
        f"{T}gradient_accumulation_fusion=True",
        f"{T}moe_router_dtype=fp32",
        f"{T}moe_permute_fusion=True",
    ],
}

ALGORITHMS: dict[str, list[str]] = {
    "grpo": [
        "algorithm.adv_estimator=grpo",
        f"{R}n=5",
        f"{A}use_kl_loss=True",
        f"{A}kl_loss_coef=0.001",
        f"{A}kl_loss_type=low_var_kl",
        "algorithm.use_kl_in_reward=False",
    ],
    "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-5", "critic.ppo_max_token_len_per_gpu=98304"],
    "dapo": [
        "algorithm.adv_estimator=grpo",
        f"{R}n=16",
        f"{A}clip_ratio_low=0.2",
        f"{A}clip_ratio_high=0.28",
        f"{A}clip_ratio_c=10.0",
        f"{A}loss_agg_mode=token-mean",
        f"{A}optim.lr_warmup_steps=10",
        f"{A}optim.weight_decay=0.1",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=3072",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward.reward_kwargs.overlong_buffer_cfg.len=1024",
        "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        "+reward.reward_kwargs.overlong_buffer_cfg.log=False",
        "+reward.reward_kwargs.max_resp_len=2048",
    ],
    "rloo": ["algorithm.adv_estimator=rloo", f"{R}n=5", "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=kl"],
    "remax": ["algorithm.adv_estimator=remax", f"{R}n=4"],
    "gspo": [
        "algorithm.adv_estimator=grpo",
        f"{R}n=16",
        f"{A}policy_loss.loss_mode=gspo",
        f"{A}clip_ratio_low=3e-4",
        f"{A}clip_ratio_high=4e-4",
    ],
    "cispo": [
        "algorithm.adv_estimator=grpo",
        f"{R}n=8",
        f"{A}policy_loss.loss_mode=cispo",
        f"{A}clip_ratio_low=10",
        f"{A}clip_ratio_high=0.2",
    ],
    "reinforce++": ["algorithm.adv_estimator=reinforce_plus_plus", f"{R}n=8"],
}


def script(folder: Path, algorithm: str, backend: str, model: str, *more: str) -> Resolved:
    return resolve([], [*data(folder, model), *COMMON, *BACKENDS[backend], *ALGORITHMS[algorithm], *more])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_script_of_verl_passes_and_means_the_same(
    algorithm: str, backend: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: object())
    resolved = script(tmp_path, algorithm, backend, model)
    cfg, actor = resolved.config, resolved.config.actor
    assert (cfg.algorithm.name, cfg.critic.enable) == (("ppo", True) if algorithm == "ppo" else ("grpo", False))
    assert (cfg.data.train_batch_size, actor.ppo_mini_batch_size, actor.max_tokens_per_gpu) == (1024, 256, 24576)
    assert (cfg.world_size, cfg.rollout.tp, cfg.rollout.val.n, cfg.rollout.val.temperature) == (8, 2, 4, 1.0)
    assert (cfg.trainer.logger, cfg.trainer.total_epochs, actor.recompute) == (["console", "wandb"], 15, "full")
    if backend == "fsdp":
        assert (actor.tp, actor.pp, actor.cp, actor.sequence_parallel) == (1, 1, 2, False)
    else:
        stages = (actor.num_layers_in_first_pipeline_stage, actor.num_layers_in_last_pipeline_stage)
        # verl's default is sequence parallelism where there are tensor-parallel ranks.
        assert (actor.tp, actor.pp, actor.cp, actor.sequence_parallel, stages) == (2, 4, 1, True, (1, 1))
    assert isinstance(actor.loss, ClipRange)
    low, high, mode = actor.loss.clip_low, actor.loss.clip_high, actor.loss_agg_mode
    expected = {
        "dapo": (0.2, 0.28, "token-mean"),
        "gspo": (3e-4, 4e-4, "seq-mean-token-mean"),
        "cispo": (1.0, 0.2, "token-mean"),
    }
    assert (low, high, mode) == expected.get(algorithm, (0.2, 0.2, "token-mean"))
    if algorithm == "dapo":
        # verl's schedule moves once a training step, which has four optimizer steps here.
        assert actor.optim.lr_warmup_steps == 40 and cfg.algorithm.overlong_buffer.len == 1024
        assert cfg.algorithm.filter_groups.max_num_gen_batches == 30
    told = {one.key for one in resolved.differs}
    assert "trainer.log_val_generations" in told
    assert (cfg.trainer.resume_mode, cfg.checkpoint.keep_last) == ("auto", 3)
    assert (f"{A}strategy" in told) == (backend == "fsdp")


def test_each_key_of_a_script_is_told_once(tmp_path: Path) -> None:
    given = [*data(tmp_path, "qwen3"), *COMMON, *BACKENDS["megatron"], *ALGORITHMS["dapo"]]
    keys = {text.lstrip("+").partition("=")[0] for text in given}
    resolved = resolve([], given)
    told = {one.verl_key for one in resolved.mapped}
    told |= {one.key for one in (*resolved.accepted, *resolved.differs)}
    assert keys <= told


@pytest.mark.parametrize(
    ("args", "key", "value", "note"),
    [
        ([f"{A}policy_loss.loss_mode=sapo"], "actor.loss_agg_mode", "seq-mean-token-mean", "verl aggregates sapo so"),
        (
            [f"{A}policy_loss.loss_mode=gspo", f"{A}loss_agg_mode=token-mean"],
            "actor.loss_agg_mode",
            "seq-mean-token-mean",
            "whatever loss_agg_mode says",
        ),
        ([f"{A}policy_loss.loss_mode=cispo", f"{A}clip_ratio_low=10"], "actor.clip_ratio_low", 1.0, "no lower clip"),
        (["trainer.critic_warmup=20"], "trainer.critic_warmup", 19, "from step 20 on: 19 steps without it"),
        (["trainer.critic_warmup=1"], "trainer.critic_warmup", 0, "from step 1 on"),
        ([f"{A}optim.lr_warmup_steps=3"], "actor.optim.lr_warmup_steps", 12, "of 4 optimizer steps each"),
        ([f"{A}clip_ratio=0.1"], "actor.clip_ratio_low", 0.2, "counts more than clip_ratio"),
        ([f"{A}optim.min_lr=1e-7"], "actor.optim.min_lr_ratio", 0.1, "as a share of lr"),
        ([f"{M}enable_gradient_checkpointing=False"], "actor.recompute", "none", "speed and memory only"),
        ([f"{A}ulysses_sequence_parallel_size=4"], "actor.cp", 4, "context parallelism"),
    ],
)
def test_what_becomes_another_value_is_said(args: list[str], key: str, value: Any, note: str, tmp_path: Path) -> None:
    base = ["algorithm.adv_estimator=grpo", f"{R}n=8", f"{A}optim.lr=1e-6", f"{A}ppo_max_token_len_per_gpu=24576"]
    resolved = resolve([], [*data(tmp_path, "qwen2.5"), *base, *args])
    found = [one for one in resolved.mapped if one.key == key]
    assert [one.value for one in found][-1] == value and note in found[-1].note


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ([f"{A}strategy=fsdp"], f"{A}strategy"),
        ([], f"{R}tensor_model_parallel_size"),
        ([f"{R}val_kwargs.do_sample=False", f"{R}val_kwargs.temperature=0.6"], f"{R}val_kwargs.do_sample"),
        (["trainer.rollout_data_dir=rollouts"], "trainer.rollout_data_dir"),
        (["trainer.validation_data_dir=val"], "trainer.validation_data_dir"),
        (
            ["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=1"],
            "trainer.max_critic_ckpt_to_keep",
        ),
        ([], "trainer.logger"),
        (['trainer.logger=["console","file"]'], "trainer.logger"),
    ],
)
def test_what_is_otherwise_here_is_said(
    args: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    base = ["algorithm.adv_estimator=grpo", f"{R}n=8"]
    resolved = resolve([], [*data(tmp_path, "qwen2.5"), *base, *args])
    [told] = [one for one in resolved.differs if one.key == name]
    assert len(told.why) > 20 and resolved.config.trainer.logger == ["console"]


SFT_OLD = [
    "data.train_batch_size=256",
    "data.max_length=1024",
    "data.prompt_key=extra_info",
    "data.response_key=extra_info",
    "+data.prompt_dict_keys=['question']",
    "+data.response_dict_keys=['answer']",
    "data.micro_batch_size_per_gpu=4",
    "optim.lr=1e-4",
    "model.fsdp_config.cpu_offload=False",
    "ulysses_sequence_parallel_size=1",
    "use_remove_padding=true",
    "trainer.default_hdfs_dir=null",
    "trainer.project_name=gsm8k-sft",
    "trainer.experiment_name=gsm8k-sft-qwen",
    'trainer.logger=["console"]',
    "trainer.total_epochs=1",
]
SFT_NEW = [
    "data.train_batch_size=96",
    "data.max_length=2048",
    "data.pad_mode=no_padding",
    "data.truncation=error",
    "data.use_dynamic_bsz=True",
    "data.max_token_len_per_gpu=8192",
    "data.messages_key=turns",
    "data.tools_key=functions",
    "data.enable_thinking_key=thinks",
    "engine=megatron",
    "optim=megatron",
    "optim.lr=2e-5",
    "optim.lr_warmup_steps_ratio=0.01",
    "optim.weight_decay=0.1",
    "optim.betas=[0.9,0.95]",
    "optim.clip_grad=1.0",
    "optim.lr_warmup_init=0",
    "optim.lr_decay_style=cosine",
    "optim.min_lr=2e-6",
    "engine.tensor_model_parallel_size=2",
    "engine.pipeline_model_parallel_size=1",
    "engine.context_parallel_size=1",
    "engine.use_mbridge=True",
    "engine.override_transformer_config.recompute_granularity=full",
    "model.use_remove_padding=true",
    "trainer.test_freq=after_each_epoch",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.total_epochs=2",
]


def test_verls_older_sft_arguments_are_read(tmp_path: Path) -> None:
    rows, model = write(tmp_path / "t.parquet", ""), make_model(tmp_path / "model", max_position_embeddings=4096)
    cfg = resolve([], [f"data.train_files={rows}", f"model.partial_pretrain={model}", *SFT_OLD]).config
    assert (cfg.algorithm.name, cfg.model.path, cfg.data.train_batch_size) == ("sft", model, 256)
    assert (cfg.max_sequence_length, cfg.actor.ppo_micro_batch_size_per_gpu) == (1024, 4)
    columns = (cfg.data.prompt_key, cfg.data.response_key, cfg.data.string_prompt)
    assert columns == ("extra_info.question", "extra_info.answer", "user")
    optim = cfg.actor.optim
    assert (optim.lr, optim.adam_beta2, optim.lr_scheduler, optim.lr_warmup_steps_ratio) == (1e-4, 0.95, "cosine", 0.1)
    assert optim.warmup_steps(100) == 10


def test_verls_newer_sft_arguments_are_read(tmp_path: Path) -> None:
    rows, model = write(tmp_path / "t.parquet", ""), make_model(tmp_path / "model", max_position_embeddings=4096)
    args = [f"data.train_files={rows}", f"model.path={model}", *SFT_NEW, "trainer.n_gpus_per_node=2"]
    resolved = resolve([], [*args, f"data.val_files={rows}"])
    cfg, actor = resolved.config, resolved.config.actor
    assert (cfg.data.messages_key, cfg.data.tools_key, cfg.data.enable_thinking_key) == ("turns", "functions", "thinks")
    assert (cfg.algorithm.name, cfg.max_sequence_length, actor.max_tokens_per_gpu) == ("sft", 2048, 8192)
    assert (actor.tp, actor.sequence_parallel, actor.recompute, cfg.world_size) == (2, True, "full", 2)
    optim = actor.optim
    assert (optim.lr, optim.lr_scheduler, optim.min_lr_ratio, optim.adam_beta2) == (
        2e-5,
        "cosine",
        pytest.approx(0.1),
        0.95,
    )
    assert (optim.lr_warmup_steps_ratio, cfg.trainer.save_freq, cfg.trainer.test_freq) == (0.01, -1, -1)


def test_a_config_of_ours_with_one_wrong_key_is_not_taken_for_verls(tmp_path: Path) -> None:
    rows, model = write(tmp_path / "t.jsonl", ""), make_model(tmp_path / "model")
    with pytest.raises(Exception, match=r"optim\.lr.*did you mean actor\.optim\.lr"):
        resolve([], [f"data.train_files={rows}", f"model.path={model}", "rollout.n=4", "optim.lr=1e-5"])


def test_a_key_that_this_run_does_not_read_is_listed(tmp_path: Path) -> None:
    """R5"""
    args = ["algorithm.adv_estimator=grpo", f"{R}n=8", f"{A}kl_loss_coef=0.5", "actor.optim.lr_warmup_steps_ratio=0.1"]
    resolved = resolve([], [*data(tmp_path, "qwen3"), *args, f"{A}optim.lr_warmup_steps=2"])
    found = {one.key: one.why for one in idle_settings(resolved.config)}
    assert "use_kl_loss is off" in found["actor.kl_loss_coef"]
    assert found["actor.optim.lr_warmup_steps_ratio"] == "lr_warmup_steps decides"


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_a_config_that_begins_from_verls_own_gets_its_defaults(name: str, tmp_path: Path) -> None:
    rest = {"algorithm": {"adv_estimator": "grpo"}, "trainer": {"total_epochs": 2}}
    text = json.dumps({"hydra": {"searchpath": ["file://x"]}, "defaults": [name, "_self_"], **rest})
    more = [f"{R}n=4", f"{A}ppo_max_token_len_per_gpu=24576"]
    cfg = resolve([write(tmp_path / "mine.yaml", text)], [*data(tmp_path, "qwen3"), *more]).config
    assert (cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.trainer.total_epochs) == (1024, 256, 2)
    assert cfg.actor.recompute == ("none" if "megatron" in name else "full")
