"""verl's keys that have a counterpart here: tables only. Those that have none are in neutral.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
REF = "actor_rollout_ref.ref."
CRITIC = "critic."

SAME_NAME = (
    "data.train_files",
    "data.prompt_key",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "data.val_batch_size",
    "data.shuffle",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "algorithm.gamma",
    "algorithm.lam",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_epochs",
    "critic.cliprange_value",
    "critic.loss_agg_mode",
    "reward.num_workers",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
    "trainer.seed",
    "trainer.project_name",
    "trainer.experiment_name",
)

RENAMED: dict[str, str] = {
    **{name: name for name in SAME_NAME},
    "data.seed": "trainer.seed",
    MODEL + "path": "model.path",
    MODEL + "tokenizer_path": "model.tokenizer_path",
    MODEL + "custom_chat_template": "model.chat_template",
    ACTOR + "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    ACTOR + "ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    ACTOR + "ppo_max_token_len_per_gpu": "actor.max_tokens_per_gpu",
    ACTOR + "ppo_epochs": "actor.ppo_epochs",
    ACTOR + "clip_ratio": "actor.clip_ratio",
    ACTOR + "clip_ratio_c": "actor.clip_ratio_c",
    **{f"{ACTOR}{part}{leaf}": f"actor.{leaf}" for part in ("", "policy_loss.") for leaf in ("tau_pos", "tau_neg")},
    **{
        f"reward_model.{part}.{leaf}": f"algorithm.overlong_buffer.{leaf}"
        for part in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for leaf in ("enable", "len", "penalty_factor")
    },
    **{
        f"reward.reward_kwargs.overlong_buffer_cfg.{leaf}": f"algorithm.overlong_buffer.{leaf}"
        for leaf in ("enable", "len", "penalty_factor")
    },
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "algorithm.rollout_correction.rollout_token_veto_threshold"
    ),
    ACTOR + "entropy_coeff": "actor.entropy_coeff",
    ACTOR + "use_kl_loss": "actor.use_kl_loss",
    ACTOR + "kl_loss_coef": "actor.kl_loss_coef",
    ACTOR + "grad_clip": "actor.optim.grad_clip",
    ACTOR + "optim.clip_grad": "actor.optim.grad_clip",
    ACTOR + "optim.lr": "actor.optim.lr",
    ACTOR + "optim.weight_decay": "actor.optim.weight_decay",
    ACTOR + "optim.eps": "actor.optim.adam_eps",
    ACTOR + "megatron.tensor_model_parallel_size": "actor.tp",
    ACTOR + "megatron.pipeline_model_parallel_size": "actor.pp",
    ACTOR + "megatron.expert_model_parallel_size": "actor.ep",
    ACTOR + "megatron.use_distributed_optimizer": "actor.use_distributed_optimizer",
    ACTOR + "megatron.dtype": "model.dtype",
    ACTOR + "fsdp_config.dtype": "model.dtype",
    **{
        f"{ACTOR}megatron.override_transformer_config.{leaf}": f"actor.{leaf}"
        for leaf in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    },
    **{
        f"{ACTOR}megatron.override_ddp_config.{leaf}": f"actor.{ours}"
        for leaf, ours in (
            ("overlap_grad_reduce", "overlap_grad_reduce"),
            ("overlap_param_gather", "overlap_param_gather"),
            ("bucket_size", "overlap_bucket_size"),
        )
    },
    ROLLOUT + "n": "rollout.n",
    ROLLOUT + "temperature": "rollout.temperature",
    ROLLOUT + "top_p": "rollout.top_p",
    ROLLOUT + "tensor_model_parallel_size": "rollout.tp",
    ROLLOUT + "dtype": "rollout.dtype",
    ROLLOUT + "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    ROLLOUT + "max_model_len": "rollout.max_model_len",
    ROLLOUT + "max_num_seqs": "rollout.max_num_seqs",
    ROLLOUT + "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    ROLLOUT + "enforce_eager": "rollout.enforce_eager",
    ROLLOUT + "free_cache_engine": "rollout.free_cache_engine",
    ROLLOUT + "val_kwargs.n": "rollout.val.n",
    ROLLOUT + "val_kwargs.top_p": "rollout.val.top_p",
    REF + "model.path": "ref.path",
    CRITIC + "model.path": "critic.path",
    CRITIC + "ppo_max_token_len_per_gpu": "critic.max_tokens_per_gpu",
    CRITIC + "megatron.tensor_model_parallel_size": "critic.tp",
    CRITIC + "megatron.pipeline_model_parallel_size": "critic.pp",
    CRITIC + "megatron.context_parallel_size": "critic.cp",
    CRITIC + "grad_clip": "critic.optim.grad_clip",
    CRITIC + "optim.clip_grad": "critic.optim.grad_clip",
    CRITIC + "optim.lr": "critic.optim.lr",
    CRITIC + "optim.weight_decay": "critic.optim.weight_decay",
    CRITIC + "optim.eps": "critic.optim.adam_eps",
    **{
        f"algorithm.kl_ctrl.{leaf}": f"algorithm.kl_ctrl.{leaf}" for leaf in ("type", "kl_coef", "target_kl", "horizon")
    },
    "trainer.nnodes": "cluster.nnodes",
    "trainer.n_gpus_per_node": "cluster.n_gpus_per_node",
    "trainer.device": "cluster.device",
    "trainer.ray_wait_register_center_timeout": "cluster.start_timeout_s",
}
"""verl's key -> the key that takes its value as it is."""

KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_LOSS = KL | {f"{name}+": f"{ours}+" for name, ours in KL.items()}
# verl's names of what is rejected: by older ones, and by the estimator of newer ones.
REJECT = {
    "token": "token", "sequence": "sequence", "geometric": "geometric",
    "token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric",
}  # fmt: skip

CHOICES: dict[str, tuple[str, Mapping[Any, object]]] = {
    ACTOR + "kl_loss_type": ("actor.kl_loss_type", KL_LOSS),
    "algorithm.kl_penalty": ("algorithm.kl_penalty", KL),
    ACTOR + "policy_loss.loss_mode": (
        "actor.loss_mode",
        {"vanilla": "ppo_clip", **{name: name for name in ("gspo", "cispo", "sapo")}},
    ),
}
"""verl's key -> the key, and verl's value -> the value. Other values are refused."""

SPECIAL: dict[str, tuple[str, Mapping[Any, object]]] = {
    "algorithm.adv_estimator": (
        "algorithm.adv_estimator",
        {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    ),
    "algorithm.filter_groups.enable": ("algorithm.filter_groups.enable", {None: False}),
    "algorithm.filter_groups.metric": (
        "algorithm.filter_groups.metric",
        {None: "score", "reward": "score", "seq_final_reward": "seq_reward"},
    ),
    "algorithm.rollout_correction.bypass_mode": ("algorithm.rollout_correction.bypass_mode", {None: False}),
    # verl neither saves nor validates at -1; here -1 does so once, at the end.
    "trainer.save_freq": ("trainer.save_freq", {-1: 0}),
    "trainer.test_freq": ("trainer.test_freq", {-1: 0}),
    ACTOR + "megatron.virtual_pipeline_model_parallel_size": ("actor.vpp", {None: 1}),
    **{
        f"{verl_role}{part}.{what}_offload": (f"{role}.{what}_offload", {None: False})
        for verl_role, role in ((ACTOR, "actor"), (CRITIC + "model.", "critic"), (CRITIC, "critic"))
        for part in ("megatron", "fsdp_config", "fsdp")
        for what in ("param", "grad", "optimizer")
    },
    ROLLOUT + "top_k": ("rollout.top_k", {0: -1}),
    ROLLOUT + "val_kwargs.top_k": ("rollout.val.top_k", {0: -1}),
    "data.val_files": ("data.val_files", {None: []}),
    "data.reward_fn_key": ("data.data_source_key", {None: "data_source"}),
    "data.filter_overlong_prompts_workers": ("data.num_workers", {None: 1}),
}
"""verl's key -> the key, and the values that are written otherwise here. Other values stay as they are."""

FREE: dict[str, str] = {
    "data.apply_chat_template_kwargs": "data.apply_chat_template_kwargs",
    ROLLOUT + "engine_kwargs.vllm": "rollout.engine_kwargs",
    MODEL + "override_config.model_config": "model.override_config",
    MODEL + "override_config": "model.override_config",
    "custom_reward_function.reward_kwargs": "reward.kwargs",
    "reward.custom_reward_function.reward_kwargs": "reward.kwargs",
}
"""Mappings whose own keys are the user's; the first that fits counts."""

DEFAULTS: dict[str, tuple[str, object]] = {
    "data.train_batch_size": ("data.train_batch_size", 1024),
    ACTOR + "ppo_mini_batch_size": ("actor.ppo_mini_batch_size", 256),
    ROLLOUT + "n": ("rollout.n", 1),
    "algorithm.adv_estimator": ("algorithm.adv_estimator", "gae"),
    "trainer.total_epochs": ("trainer.total_epochs", 30),
    "trainer.nnodes": ("cluster.nnodes", 1),
    "trainer.n_gpus_per_node": ("cluster.n_gpus_per_node", 8),
    "trainer.save_freq": ("trainer.save_freq", 0),
    "trainer.test_freq": ("trainer.test_freq", 0),
}
"""verl's defaults that decide what is trained and are not ours: they hold where a verl config is silent."""
