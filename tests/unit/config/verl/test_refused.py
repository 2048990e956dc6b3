"""What a verl config asks for and is not offered: one clear fault each, with the feature's name and a cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.load import resolve, run_schema
from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl import known_keys, rules, training, translate
from megatron_rl.errors import ConfigError, Fault
from tests.helpers.config import make_model, write

A, R, M, F = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.model.",
    "actor_rollout_ref.ref.",
)


def run(folder: Path, *overrides: str) -> list[Fault]:
    """Faults of a right run with `overrides`; nothing is written."""
    model, rows = make_model(folder / "model"), write(folder / "rows.jsonl", "")
    before = sorted(str(path) for path in folder.rglob("*"))
    base = [
        f"{M}path={model}",
        f"data.train_files={rows}",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "data.train_batch_size=256",
        "algorithm.adv_estimator=grpo",
        f"{R}n=8",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={folder}/runs",
    ]
    with pytest.raises(ConfigError) as caught:
        resolve([], [*base, *overrides])
    assert sorted(str(path) for path in folder.rglob("*")) == before
    return caught.value.faults


LACKS = [
    (["critic.model.lora_rank=32", "critic.model.lora_alpha=16"], "critic.model.lora_rank", "LoRA of a critic"),
    (["critic.model.lora.rank=16", "critic.model.lora.alpha=32"], "critic.model.lora.rank", "LoRA of a critic"),
    ([f"{R}name=sglang"], f"{R}name", "SGLang"),
    ([f"{R}name=trtllm"], f"{R}name", "TensorRT-LLM"),
    ([f"{R}multi_turn.enable=True", f"{R}multi_turn.max_user_turns=5"], f"{R}multi_turn.enable", "several turns"),
    ([f"{R}agent.default_agent_loop=tool_agent"], f"{R}agent.default_agent_loop", "several turns"),
    (["data.tool_config_path=tools.yaml"], "data.tool_config_path", "tools and several turns"),
    ([f"{R}agent.agent_loop_config_path=x.yaml"], f"{R}agent.agent_loop_config_path", "agent loop"),
    (["distillation.enabled=True", "distillation.teacher_key=x"], "distillation.enabled", "on-policy distillation"),
    ([f"{A}router_replay.mode=R4"], f"{A}router_replay.mode", "router replay"),
    ([f"{R}enable_rollout_routing_replay=True"], f"{R}enable_rollout_routing_replay", "router replay"),
    ([f"{R}quantization=fp8"], f"{R}quantization", "FP8"),
    ([f"+{A}megatron.override_transformer_config.fp8=hybrid"], None, "FP8 training"),
    ([f"{A}fsdp_config.qat.enable=True", f"{A}fsdp_config.qat.mode=w4a16"], None, "quantization-aware training"),
    ([f"{M}mtp.enable=True", f"{M}mtp.method=mtp"], f"{M}mtp.enable", "multi-token prediction"),
    (["async_training.staleness_threshold=0.5", "async_training.partial_rollout=True"], None, "asynchronous training"),
    (["trainer.v1.trainer_mode=separate_async"], "trainer.v1.trainer_mode", "asynchronous training"),
    ([f"{R}nnodes=1"], f"{R}nnodes", "nodes of their own"),
    (["actor_rollout_ref.hybrid_engine=False"], "actor_rollout_ref.hybrid_engine", "engines apart from the trainer"),
    ([f"{A}profiler.enable=True", f"{A}profiler.ranks=[0]"], f"{A}profiler.enable", "a profiler"),
    (["global_profiler.steps=[1,2]", "global_profiler.tool=nsys"], "global_profiler.steps", "a profiler"),
    (["trainer.resume_mode=resume_path"], "trainer.resume_mode", "resume_from_path is not given"),
    ([f"{A}strategy=mindspeed"], f"{A}strategy", "another training backend"),
    ([f"{A}optim.optimizer=muon"], f"{A}optim.optimizer", "another optimizer"),
    ([f"+{A}optim.override_optimizer_config.optimizer_cpu_offload=True"], None, "an optimizer that steps on the CPU"),
    ([f"{A}optim.use_precision_aware_optimizer=True"], None, "a precision-aware optimizer"),
    ([f"+{A}megatron.override_transformer_config.moe_z_loss_coeff=0.01"], None, "a z loss"),
    ([f"+{A}megatron.override_transformer_config.num_query_groups=2"], None, "TransformerConfig"),
    (["+critic.model.override_config.max_position_embeddings=32768"], None, "a change to config.json"),
    ([f"{A}policy_loss.loss_mode=clip_cov"], f"{A}policy_loss.loss_mode", "'clip_cov'"),
    (["reward_model.enable=True", "reward_model.rollout.name=vllm"], "reward_model.enable", "a reward model"),
    (["reward.reward_model.enable=True"], "reward.reward_model.enable", "a reward model"),
    (["reward_model.reward_manager=prime"], "reward_model.reward_manager", "another reward manager"),
    (["reward.sandbox_fusion.url=http://x"], "reward.sandbox_fusion.url", "Sandbox Fusion"),
    (["algorithm.use_pf_ppo=True", "algorithm.pf_ppo.weight_pow=2.0"], "algorithm.use_pf_ppo", "PF-PPO"),
    (["data.custom_cls.path=x.py", "data.custom_cls.name=C"], "data.custom_cls.path", "a data class"),
    (["data.sampler.class_path=x.py"], "data.sampler.class_path", "a sampler"),
    (["data.image_key=pictures"], "data.image_key", "images"),
    (["data.train_max_samples=100"], "data.train_max_samples", "a limit on the rows"),
    (['trainer.logger=["console","swanlab"]'], "trainer.logger", "swanlab"),
    (["trainer.val_only=True"], "trainer.val_only", "validation alone"),
    ([f"{A}shuffle=True"], f"{A}shuffle", "another order"),
    (["defaults=[my_base]"], "defaults", "names my_base"),
    (["mine@actor_rollout_ref.actor=special"], "mine@actor_rollout_ref.actor", "config groups"),
    ([f"{A}profiler.enabel=True"], f"{A}profiler.enabel", "neither verl's"),
    ([f"{A}ppo_minibatch_size=64"], f"{A}ppo_minibatch_size", "neither verl's"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "lacks"), LACKS, ids=[case[0][0][:60] for case in LACKS])
def test_a_feature_that_is_not_offered_is_one_fault_with_its_name(
    overrides: list[str], key: str | None, lacks: str, tmp_path: Path
) -> None:
    """R5"""
    [fault] = run(tmp_path, *overrides)
    assert fault.key == (key or overrides[0].lstrip("+").partition("=")[0])
    assert lacks in fault.reason and "[set on the command line]" in fault.reason and len(fault.cure) > 8


@pytest.mark.parametrize(
    "override",
    [
        f"{M}lora_rank=0",
        f"{R}multi_turn.enable=False",
        f"{A}strategy=fsdp",
        f"{A}router_replay.mode=disabled",
        f"{R}quantization=null",
        "trainer.resume_mode=auto",
        f"{R}expert_parallel_size=1",
        f"{R}val_kwargs.do_sample=False",
        "data.train_max_samples=-1",
        "reward_model.enable=False",
        f"{A}optim.optimizer=AdamW",
        f"{A}fsdp_config.fsdp_size=-1",
        f"{A}fsdp_config.a_key_of_a_later_version=1",
        "ray_kwargs.timeline_json_file=null",
    ],
)
def test_verls_default_of_the_same_keys_is_no_fault(override: str, tmp_path: Path) -> None:
    [fault] = run(tmp_path, override, "rollout.tp=3")
    assert fault.key == "rollout.tp"


ODD: list[Any] = [["a"], {}, "x", "", -1, 0, True, 1e300, None, "???"]


def lost(entries: list[Entry]) -> set[str]:
    """Keys of which the translation says nothing."""
    found = translate(entries, run_schema())
    told = {one.verl_key for one in found.mapped} | {one.key for one in (*found.accepted, *found.differs)}
    told |= {fault.key for fault in found.faults} | {one.key for one in found.entries}
    switched_off = {"profiler", "multi_turn", "qat", "mtp", "lora"}
    return {entry.key for entry in entries if entry.key not in told and not switched_off & set(entry.key.split("."))}


@pytest.mark.parametrize("value", ODD, ids=str)
def test_no_odd_value_of_a_known_key_is_a_crash_or_is_lost(value: Any) -> None:
    assert not lost([Entry(key, value, "in x.yaml:1", 0) for key in known_keys()])
    names = ("data.max_length", "engine", "optim", "data.prompt_dict_keys", "data.truncation", "trainer.save_freq")
    assert not lost([Entry(name, value, "in x.yaml:1", 0) for name in names])
    for key in (*rules.KEYS, *training.KEYS):
        entries = [Entry(f"{R}n", 4, "", 0), Entry(key, value, "in x.yaml:1", 0)]
        assert not lost(entries), key


SFT = [
    (["data.truncation=left"], "data.truncation", "at their end", "write right or error"),
    (["data.max_length=none"], "data.max_length", "no number of tokens", "whole number"),
    (["engine=deepspeed"], "engine", "another training backend", "write megatron"),
    (["trainer.save_freq=after_each_epoch"], "trainer.save_freq", "after each epoch", "number of steps"),
    (["optim.optimizer=sgd"], "optim.optimizer", "another optimizer", "write adam"),
    (["data.prompt_key=p", "data.prompt_dict_keys=[a,b]"], "data.prompt_dict_keys", "several fields", "name one field"),
    (["data.micro_batch_size=8"], "data.micro_batch_size", "over all ranks", "micro_batch_size_per_gpu"),
    (["data.ignore_input_ids_mismatch=True"], "data.ignore_input_ids_mismatch", "joined turns", "set it to false"),
    (["engine.override_transformer_config.fp8=hybrid"], None, "FP8 training", "remove it"),
]


@pytest.mark.parametrize(("overrides", "key", "reason", "cure"), SFT, ids=[case[0][0] for case in SFT])
def test_faults_of_an_sft_config_name_the_key_that_it_has(
    overrides: list[str], key: str | None, reason: str, cure: str, tmp_path: Path
) -> None:
    model, rows = make_model(tmp_path / "model", max_position_embeddings=4096), write(tmp_path / "rows.jsonl", "")
    base = [f"model.path={model}", f"data.train_files={rows}", "data.pad_mode=no_padding", "optim.lr=1e-5"]
    base += ["engine.tensor_model_parallel_size=1", f"trainer.default_local_dir={tmp_path}/runs"]
    base += ["data.max_length=64"] * (overrides[0].partition("=")[0] != "data.max_length")
    with pytest.raises(ConfigError) as caught:
        resolve([], [*base, *overrides])
    [fault] = caught.value.faults
    assert fault.key == (key or overrides[0].partition("=")[0])
    assert reason in fault.reason and cure in fault.cure
