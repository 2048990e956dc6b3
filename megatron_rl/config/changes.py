"""What may differ between a checkpoint's config and that of the run that goes on from it: one table of all keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron_rl.config.load import run_schema, settings_of
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def _below(section: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for key in keys)


_LAYOUT = ("tp", "pp", "cp", "sequence_parallel", "recompute")
_MICRO_BATCHES = ("ppo_micro_batch_size_per_gpu", "max_tokens_per_gpu")
_OFFLOAD = ("param_offload", "grad_offload", "optimizer_offload")
_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_PLACES = ("device", "own_gpu", "num_workers", "num_cpus")
_ENGINE_MEMORY = ("gpu_memory_utilization", "kv_cache_gb", "max_num_seqs")

FREE: tuple[str, ...] = (
    *_below("model.lora", "sync", "save"),
    *_below("data", "val_files", "val_prompt_files", "val_batch_size", "num_workers", "cache_dir"),
    *_below("actor", *_LAYOUT, "vpp", "ep", "etp", *_STAGES, "use_distributed_optimizer", "packing"),
    *_below("actor", "keep_logits_gib", "flash_attention"),
    *_below("actor", "overlap_grad_reduce", "overlap_param_gather", "overlap_bucket_size"),
    *_below("actor", *_MICRO_BATCHES, *_OFFLOAD),
    *_below("critic", *_LAYOUT, *_MICRO_BATCHES, *_OFFLOAD),
    *_below("rollout", "tp", "ep", "share_weights", "weight_sync", "sync_bucket_mb", *_ENGINE_MEMORY),
    *_below("rollout", "max_model_len", "max_num_batched_tokens", "enforce_eager", "free_cache_engine"),
    *_below("rollout", "decode", "engine_kwargs", "val."),
    *_below("reward", "num_workers", "timeout_s", "memory_limit_gb", "max_failed_share"),
    *_below("reward.model", *_PLACES, "batch_size"),
    *_below("reward.judge", *_PLACES, *_ENGINE_MEMORY),
    *_below("algorithm", "max_mismatch", "max_mismatch_steps"),
    *_below("trainer", "total_epochs", "total_training_steps", "target_loss", "early_stop."),
    *_below("trainer", "on_nonfinite", "max_nonfinite_skips"),
    *_below("trainer", "save_freq", "save_hf", "save_shard_gb", "test_freq", "val_before_train"),
    *_below("trainer", "default_local_dir", "project_name"),
    *_below("trainer", "experiment_name", "overwrite", "resume_mode", "resume_changes", "max_time", "max_restarts"),
    *_below("trainer", "restart_wait_s", "profile.", "logger", "num_logged_rollouts"),
    "checkpoint.",
    "cluster.",
)
"""How a run computes, how long it is and what it writes. A name that ends in a dot stands for all keys below it."""

LEARNED: tuple[str, ...] = (
    *_below("model", "path", "tokenizer_path", "chat_template", "eos_token", "init", "override_config", "dtype"),
    *_below("model.lora", "rank", "alpha", "use_rslora", "dropout", "target_modules", "exclude_modules", "path"),
    *_below("data", "train_files", "mix_weights", "prompt_key", "string_prompt", "label_key", "metadata_key"),
    *_below("data", "chosen_key", "rejected_key", "margin_key"),
    *_below("data", "data_source_key", "response_key", "messages_key", "tools_key", "enable_thinking_key"),
    *_below("data", "max_prompt_length", "max_response_length", "train_batch_size", "overlong_prompts", "shuffle"),
    *_below("data", "chat_template", "apply_chat_template_kwargs"),
    *_below("actor", "optim.", "ppo_mini_batch_size", "ppo_epochs", "loss.", "loss_agg_mode", "entropy_coeff"),
    *_below("actor", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "kl_loss_importance", "router_replay"),
    "actor.router_aux_loss_coef",
    *_below("critic", "enable", "path", "share_backbone", "vf_coef", "optim.", "ppo_mini_batch_size", "ppo_epochs"),
    *_below("critic", "cliprange_value", "loss_agg_mode"),
    "ref.",
    *_below("rollout", "name", "n", "temperature", "top_p", "top_k", "stop", "dtype", "seed_per_sample"),
    *_below("reward", "function", "kwargs", "parts", "by_source", "failed_score"),
    *_below("reward.model", "path", "tokenizer_path", "dtype", "chat_template", "apply_chat_template_kwargs"),
    *_below("reward.model", "max_length", "activation", "overlong"),
    *_below("reward.judge", "path", "tokenizer_path", "dtype", "chat_template", "apply_chat_template_kwargs"),
    *_below("reward.judge", "max_length", "engine", "template", "score_pattern", "lowest", "highest"),
    *_below("reward.judge", "max_tokens", "temperature"),
    *_below(
        "algorithm",
        "name",
        "loss.",
        "reward_loss.",
        "adv_estimator.",
        "use_kl_in_reward",
        "kl_ctrl.",
        "kl_penalty",
        "drop_flat_groups",
    ),
    *_below("algorithm", "overlong_filtering", "overlong_buffer.", "filter_groups.", "rollout_correction."),
    *_below("trainer", "critic_warmup", "max_staleness", "seed"),
)
"""What is learned changes with these: they may differ where trainer.resume_changes names them."""


@dataclass(frozen=True)
class Difference:
    """A key whose value is another than in the checkpoint's config."""

    key: str
    before: object
    now: object

    @property
    def is_free(self) -> bool:
        """What is learned stays the same."""
        return covers(FREE, self.key)

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r} and is {self.now!r}"


def covers(names: tuple[str, ...], key: str) -> bool:
    """Whether one of the names is the key, or stands for all keys of its section."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def differences(saved: Mapping[str, object], cfg: RunConfig) -> list[Difference]:
    """Keys that differ, in the order of the schema. saved: a config as to_dict gives it; a key that it lacks had the
    default, since the key came later.
    """
    unlike: list[Difference] = []
    for key, now in settings_of(cfg):
        before = _value(saved, key.name, key.default)
        if before != _plain(now):
            unlike.append(Difference(key.name, before, now))
    return unlike


def refused(unlike: list[Difference], allowed: list[str]) -> list[Fault]:
    """A fault for each difference that changes what is learned and that is not allowed. allowed: keys."""
    short = run_schema().short
    names = tuple(short.get(name, name) for name in allowed)
    faults: list[Fault] = []
    for one in unlike:
        if one.is_free or covers(names, one.key):
            continue
        reason = f"was {one.before!r} when the checkpoint was written, and changes what is learned"
        cure = f"set it back, or add {one.key} to trainer.resume_changes"
        faults.append(Fault(one.key, one.now, reason, cure))
    return faults


def _value(tree: Mapping[str, object], name: str, default: object) -> object:
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return _plain(default)
        node = cast("dict[str, Any]", node)[part]
    return node


def _plain(value: Any) -> object:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))
