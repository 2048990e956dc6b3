"""verl's keys and what they are here: tables only, read by verl.py."""

from __future__ import annotations

from collections.abc import Callable
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
    "trainer.critic_warmup",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
)

RENAMED: dict[str, str] = {
    **{name: name for name in SAME_NAME},
    "data.seed": "trainer.seed",
    MODEL + "path": "model.path",
    MODEL + "tokenizer_path": "model.tokenizer_path",
    ACTOR + "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    ACTOR + "ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    ACTOR + "ppo_max_token_len_per_gpu": "actor.max_tokens_per_gpu",
    ACTOR + "ppo_epochs": "actor.ppo_epochs",
    ACTOR + "clip_ratio": "actor.clip_ratio",
    ACTOR + "clip_ratio_low": "actor.clip_ratio_low",
    ACTOR + "clip_ratio_high": "actor.clip_ratio_high",
    ACTOR + "clip_ratio_c": "actor.clip_ratio_c",
    **{f"{ACTOR}{part}{leaf}": f"actor.{leaf}" for part in ("", "policy_loss.") for leaf in ("tau_pos", "tau_neg")},
    **{
        f"reward_model.{part}.{leaf}": f"algorithm.overlong_buffer.{leaf}"
        for part in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for leaf in ("enable", "len", "penalty_factor")
    },
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "algorithm.rollout_correction.rollout_token_veto_threshold"
    ),
    ACTOR + "loss_agg_mode": "actor.loss_agg_mode",
    ACTOR + "entropy_coeff": "actor.entropy_coeff",
    ACTOR + "use_kl_loss": "actor.use_kl_loss",
    ACTOR + "kl_loss_coef": "actor.kl_loss_coef",
    ACTOR + "grad_clip": "actor.optim.grad_clip",
    ACTOR + "optim.clip_grad": "actor.optim.grad_clip",
    ACTOR + "optim.lr": "actor.optim.lr",
    ACTOR + "optim.weight_decay": "actor.optim.weight_decay",
    ACTOR + "optim.lr_decay_steps": "actor.optim.lr_decay_steps",
    ACTOR + "optim.lr_decay_style": "actor.optim.lr_scheduler",
    ACTOR + "optim.lr_scheduler_type": "actor.optim.lr_scheduler",
    ACTOR + "optim.warmup_style": "actor.optim.lr_scheduler",
    ACTOR + "megatron.tensor_model_parallel_size": "actor.tp",
    ACTOR + "megatron.pipeline_model_parallel_size": "actor.pp",
    ACTOR + "megatron.context_parallel_size": "actor.cp",
    ACTOR + "megatron.expert_model_parallel_size": "actor.ep",
    ACTOR + "megatron.use_distributed_optimizer": "actor.use_distributed_optimizer",
    ACTOR + "megatron.dtype": "model.dtype",
    ROLLOUT + "name": "rollout.name",
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
    ROLLOUT + "val_kwargs.temperature": "rollout.val.temperature",
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
    CRITIC + "optim.lr_decay_steps": "critic.optim.lr_decay_steps",
    CRITIC + "optim.lr_decay_style": "critic.optim.lr_scheduler",
    CRITIC + "optim.lr_scheduler_type": "critic.optim.lr_scheduler",
    CRITIC + "optim.warmup_style": "critic.optim.lr_scheduler",
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

CHOICES: dict[str, tuple[str, dict[Any, Any]]] = {
    ACTOR + "kl_loss_type": ("actor.kl_loss_type", KL_LOSS),
    "algorithm.kl_penalty": ("algorithm.kl_penalty", KL),
    ACTOR + "policy_loss.loss_mode": (
        "actor.loss_mode",
        {"vanilla": "ppo_clip", **{name: name for name in ("gspo", "cispo", "sapo")}},
    ),
}
"""verl's key -> the key, and verl's value -> the value. Other values are refused."""

SPECIAL: dict[str, tuple[str, dict[Any, Any]]] = {
    "algorithm.adv_estimator": (
        "algorithm.adv_estimator",
        {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    ),
    "algorithm.filter_groups.enable": ("algorithm.filter_groups.enable", {None: False}),
    "algorithm.filter_groups.metric": ("algorithm.filter_groups.metric", {None: "score"}),
    "algorithm.rollout_correction.bypass_mode": ("algorithm.rollout_correction.bypass_mode", {None: False}),
    # verl neither saves nor validates at -1; here -1 does so once, at the end.
    "trainer.save_freq": ("trainer.save_freq", {-1: 0}),
    "trainer.test_freq": ("trainer.test_freq", {-1: 0}),
    ACTOR + "optim.lr_warmup_steps": ("actor.optim.lr_warmup_steps", {-1: 0, None: 0}),
    ACTOR + "optim.min_lr_ratio": ("actor.optim.min_lr_ratio", {None: 0.0}),
    ACTOR + "megatron.virtual_pipeline_model_parallel_size": ("actor.vpp", {None: 1}),
    CRITIC + "optim.lr_warmup_steps": ("critic.optim.lr_warmup_steps", {-1: 0, None: 0}),
    CRITIC + "optim.min_lr_ratio": ("critic.optim.min_lr_ratio", {None: 0.0}),
    **{
        f"{verl_role}{part}.{what}_offload": (f"{role}.{what}_offload", {None: False})
        for verl_role, role in ((ACTOR, "actor"), (CRITIC + "model.", "critic"), (CRITIC, "critic"))
        for part in ("megatron", "fsdp_config")
        for what in ("param", "grad", "optimizer")
    },
    ROLLOUT + "top_k": ("rollout.top_k", {0: -1}),
    ROLLOUT + "val_kwargs.top_k": ("rollout.val.top_k", {0: -1}),
    "critic.enable": ("critic.enable", {None: False}),
    "data.val_files": ("data.val_files", {None: []}),
    "data.reward_fn_key": ("data.data_source_key", {None: "data_source"}),
    "data.filter_overlong_prompts_workers": ("data.num_workers", {None: 1}),
}
"""verl's key -> the key, and the values that are written otherwise here. Other values stay as they are."""

FREE: dict[str, str] = {
    "data.apply_chat_template_kwargs": "data.apply_chat_template_kwargs",
    ROLLOUT + "engine_kwargs.vllm": "rollout.engine_kwargs",
    "custom_reward_function.reward_kwargs": "reward.kwargs",
    "reward.custom_reward_function.reward_kwargs": "reward.kwargs",
}
"""Mappings whose own keys are the user's."""

DEFAULTS: dict[str, tuple[str, Any]] = {
    "data.train_batch_size": ("data.train_batch_size", 1024),
    ACTOR + "ppo_mini_batch_size": ("actor.ppo_mini_batch_size", 256),
    ROLLOUT + "n": ("rollout.n", 1),
    "algorithm.adv_estimator": ("algorithm.adv_estimator", "gae"),
    "trainer.total_epochs": ("trainer.total_epochs", 30),
    "trainer.n_gpus_per_node": ("cluster.n_gpus_per_node", 8),
    "trainer.save_freq": ("trainer.save_freq", 0),
    "trainer.test_freq": ("trainer.test_freq", 0),
}
"""verl's defaults that decide what is trained and are not ours: they hold where a verl config is silent."""

Accepts = Callable[[Any], bool]


def _any(value: Any) -> bool:
    return True


def _unset(value: Any) -> bool:
    return value in (None, False, "", 0) or value == [] or value == {}


def _is(*values: Any) -> Accepts:
    return lambda value: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


_OFFLOAD = "the reference stays on the device here: same numbers, more memory"
_SPEED = "speed and memory only: same numbers"
_PACKED = "sequences are packed here, without padding, unless actor.packing is false: same numbers"
_PASS = "passes without gradients use actor.max_tokens_per_gpu: same numbers"
_OFF = "off, as here"
_TEXT = "text only here"

NEUTRAL: dict[str, tuple[Accepts, str]] = {
    "data.tokenizer": (_unset, _OFF),
    "data.use_shm": (_unset, _OFF),
    "data.train_max_samples": (_is(-1, None), "all rows, as here"),
    "data.val_max_samples": (_is(-1, None), "all rows, as here"),
    "data.return_raw_input_ids": (_unset, _OFF),
    "data.return_full_prompt": (_any, "prompts are kept as text and tokens here"),
    "data.return_raw_chat": (_any, "a switch inside verl"),
    "data.return_multi_modal_inputs": (_any, _TEXT),
    "data.image_key": (_is("images", None), _TEXT),
    "data.video_key": (_is("videos", None), _TEXT),
    "data.audio_key": (_is("audios", None), _TEXT),
    "data.image_patch_size": (_any, _TEXT),
    "data.dataloader_num_workers": (_any, _SPEED),
    "data.validation_shuffle": (_any, "validation covers all rows in any order"),
    "data.trust_remote_code": (_unset, _OFF),
    "data.custom_cls.path": (_unset, _OFF),
    "data.custom_cls.name": (_unset, _OFF),
    "data.sampler.class_path": (_unset, _OFF),
    "data.sampler.class_name": (_unset, _OFF),
    "data.datagen.path": (_unset, _OFF),
    "data.datagen.name": (_unset, _OFF),
    "data.tool_config_path": (_unset, _OFF),
    MODEL + "use_shm": (_unset, _OFF),
    MODEL + "external_lib": (_unset, _OFF),
    MODEL + "hf_config_path": (_unset, _OFF),
    MODEL + "custom_chat_template": (_unset, _OFF),
    MODEL + "override_config": (_unset, _OFF),
    MODEL + "override_config.model_config": (_unset, _OFF),
    MODEL + "override_config.moe_config.freeze_moe_router": (_unset, _OFF),
    MODEL + "enable_gradient_checkpointing": (_any, "activations are kept here: same numbers, more memory"),
    MODEL + "enable_activation_offload": (_unset, _OFF),
    MODEL + "use_remove_padding": (_any, _PACKED),
    MODEL + "use_liger": (_any, _SPEED),
    MODEL + "use_fused_kernels": (_any, _SPEED),
    MODEL + "fused_kernel_options.impl_backend": (_any, _SPEED),
    MODEL + "trust_remote_code": (_unset, _OFF),
    MODEL + "lora_rank": (_unset, "no LoRA, as here"),
    MODEL + "lora_alpha": (_any, "no LoRA here"),
    MODEL + "target_modules": (_any, "no LoRA here"),
    MODEL + "exclude_modules": (_any, "no LoRA here"),
    MODEL + "lora.rank": (_unset, "no LoRA, as here"),
    MODEL + "mtp.enable": (_unset, _OFF),
    ACTOR + "strategy": (_is("megatron"), "training always runs through Megatron-Core"),
    ACTOR + "use_dynamic_bsz": (_any, "micro-batches are always filled by tokens: same numbers"),
    ACTOR + "ppo_micro_batch_size": (_is(None), _OFF),
    ACTOR + "shuffle": (_unset, "mini-batches keep the order of the batch, as here"),
    ACTOR + "loss_scale_factor": (_is(None), _OFF),
    ACTOR + "use_torch_compile": (_any, _SPEED),
    ACTOR + "use_remove_padding": (_any, _PACKED),
    ACTOR + "use_fused_kernels": (_any, _SPEED),
    ACTOR + "entropy_from_logits_with_chunking": (_any, _SPEED),
    ACTOR + "entropy_checkpointing": (_any, _SPEED),
    ACTOR + "calculate_entropy": (_any, "entropy is always measured"),
    ACTOR + "ulysses_sequence_parallel_size": (_is(1), _OFF),
    ACTOR + "data_loader_seed": (_any, "mini-batches are not shuffled here"),
    ACTOR + "freeze_vision_tower": (_any, _TEXT),
    ACTOR + "load_weight": (_is(True), "weights are always loaded"),
    ACTOR + "router_replay.mode": (_is("disabled", None), _OFF),
    ACTOR + "qat.enable": (_unset, _OFF),
    ACTOR + "checkpoint.async_save": (_unset, _OFF),
    ACTOR + "optim.lr_warmup_steps_ratio": (_unset, "no warm-up by share, as here"),
    ACTOR + "optim.total_training_steps": (_is(-1, None), "the run's steps, as here"),
    ACTOR + "optim.optimizer": (_is("adam", "AdamW"), "AdamW, as here"),
    ACTOR + "optim.optimizer_impl": (_is("torch.optim"), "AdamW, as here"),
    ACTOR + "optim.lr_warmup_init": (_unset, "the rate rises from 0, as here"),
    ACTOR + "optim.weight_decay_incr_style": (_is("constant"), "constant, as here"),
    ACTOR + "optim.num_cycles": (_is(0.5, None), "half a cosine, as here"),
    ACTOR + "optim.use_checkpoint_opt_param_scheduler": (_unset, _OFF),
    ACTOR + "optim.override_optimizer_config": (_unset, _OFF),
    ACTOR + "megatron.use_dist_checkpointing": (_unset, _OFF),
    ACTOR + "megatron.dist_checkpointing_path": (_unset, _OFF),
    ACTOR + "megatron.dist_checkpointing_prefix": (_unset, _OFF),
    ACTOR + "megatron.use_mbridge": (_any, "weights are always read from and written to HF form"),
    ACTOR + "megatron.vanilla_mbridge": (_any, "weights are always read from and written to HF form"),
    ACTOR + "megatron.use_remove_padding": (_any, _PACKED),
    ACTOR + "megatron.seed": (_any, "nothing is drawn on the workers: no dropout"),
    ACTOR + "megatron.forward_only": (_unset, _OFF),
    ACTOR + "megatron.override_ddp_config": (_unset, _OFF),
    ACTOR + "megatron.override_transformer_config": (_unset, _OFF),
    ACTOR + "megatron.override_mcore_model_config": (_unset, _OFF),
    REF + "strategy": (_is("megatron"), "every model runs through Megatron-Core"),
    REF + "fsdp_config.param_offload": (_any, _OFFLOAD),
    REF + "megatron.param_offload": (_any, _OFFLOAD),
    REF + "megatron.grad_offload": (_any, "the reference has no gradients"),
    REF + "megatron.optimizer_offload": (_any, "the reference has no optimizer"),
    REF + "megatron.use_mbridge": (_any, "weights are always read from HF form"),
    REF + "use_torch_compile": (_any, _SPEED),
    REF + "ulysses_sequence_parallel_size": (_is(1), _OFF),
    REF + "entropy_from_logits_with_chunking": (_any, _SPEED),
    REF + "entropy_checkpointing": (_any, _SPEED),
    REF + "model": (_is(None), "the actor's starting weights, as here"),
    REF + "load_weight": (_is(True), "weights are always loaded"),
    REF + "log_prob_micro_batch_size": (_any, _PASS),
    REF + "log_prob_micro_batch_size_per_gpu": (_any, _PASS),
    REF + "log_prob_use_dynamic_bsz": (_any, _PASS),
    REF + "log_prob_max_token_len_per_gpu": (_any, _PASS),
    ROLLOUT + "mode": (_is("sync", "async"), "the engine runs in the worker; steps are the same"),
    ROLLOUT + "ignore_eos": (_unset, _OFF),
    ROLLOUT + "do_sample": (_is(True), "sampling, as here"),
    ROLLOUT + "use_fire_sampling": (_unset, _OFF),
    ROLLOUT + "repetition_penalty": (_is(1, 1.0, None), _OFF),
    ROLLOUT + "enable_chunked_prefill": (_any, "the engine's own choice: same samples"),
    ROLLOUT + "enable_prefix_caching": (_any, "the engine's own choice: same samples"),
    ROLLOUT + "cudagraph_capture_sizes": (_unset, _OFF),
    ROLLOUT + "load_format": (_any, "the engine's weights come from the trainer"),
    ROLLOUT + "layered_summon": (_any, "the engine's weights come from the trainer"),
    ROLLOUT + "update_weights_bucket_megabytes": (_any, _SPEED),
    ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes": (_any, _SPEED),
    ROLLOUT + "checkpoint_engine.backend": (_is("naive", None), "engines share the trainer's ranks, as here"),
    ROLLOUT + "data_parallel_size": (_is(1), "one engine a rank group, as here"),
    ROLLOUT + "expert_parallel_size": (_is(1), "each engine holds all experts, as here"),
    ROLLOUT + "pipeline_model_parallel_size": (_is(1), _OFF),
    ROLLOUT + "calculate_log_probs": (_any, "the engine's log-probabilities are always kept and compared"),
    ROLLOUT + "logprobs_mode": (_is("processed_logprobs", None), "at the sampling temperature, as here"),
    ROLLOUT + "log_prob_micro_batch_size": (_any, _PASS),
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": (_any, _PASS),
    ROLLOUT + "log_prob_use_dynamic_bsz": (_any, _PASS),
    ROLLOUT + "log_prob_max_token_len_per_gpu": (_any, _PASS),
    ROLLOUT + "disable_log_stats": (_any, "logging of the engine only"),
    ROLLOUT + "over_sample_rate": (_unset, _OFF),
    ROLLOUT + "multi_stage_wake_up": (_any, _SPEED),
    ROLLOUT + "skip_rollout": (_unset, _OFF),
    ROLLOUT + "skip_tokenizer_init": (_any, "tokens in, tokens out, here too"),
    ROLLOUT + "chat_scheduler": (_unset, _OFF),
    ROLLOUT + "limit_images": (_any, _TEXT),
    ROLLOUT + "quantization": (_unset, _OFF),
    ROLLOUT + "enable_rollout_routing_replay": (_unset, _OFF),
    ROLLOUT + "engine_kwargs": (_unset, _OFF),
    ROLLOUT + "engine_kwargs.swap_space": (_is(None), "the engine's default"),
    ROLLOUT + "agent.num_workers": (_any, _SPEED),
    ROLLOUT + "agent.default_agent_loop": (_is("single_turn_agent", None), "one turn, as here"),
    ROLLOUT + "trace.backend": (_unset, _OFF),
    ROLLOUT + "prometheus.enable": (_unset, _OFF),
    "actor_rollout_ref.hybrid_engine": (_is(True), "actor and engine share their ranks"),
    "actor_rollout_ref.nccl_timeout": (_is(600), "cluster.step_timeout_s is the deadline here"),
    "algorithm.filter_groups": (_is(None), _OFF),
    "algorithm.use_pf_ppo": (_unset, _OFF),
    "algorithm.rollout_correction": (_unset, _OFF),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (_unset, _OFF),
    "algorithm.rollout_correction.use_policy_gradient": (_unset, "actor.loss_mode decides: reinforce has no ratio"),
    "algorithm.rollout_correction.loss_type": (_is("ppo_clip", None), "actor.loss_mode decides"),
    "reward_model.overlong_buffer.log": (_any, "always logged"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": (_any, "always logged"),
    "reward_model.reward_kwargs.max_resp_len": (_any, "data.max_response_length decides"),
    "trainer.balance_batch": (_any, "ranks are always balanced by tokens: same numbers"),
    "trainer.val_only": (_unset, _OFF),
    "trainer.resume_mode": (_is("disable"), "each run starts afresh"),
    "trainer.resume_from_path": (_unset, _OFF),
    "trainer.default_hdfs_dir": (_unset, _OFF),
    "trainer.del_local_ckpt_after_load": (_unset, _OFF),
    "trainer.max_actor_ckpt_to_keep": (_is(None), "all saves are kept"),
    "trainer.max_critic_ckpt_to_keep": (_is(None), "all saves are kept"),
    "trainer.log_val_generations": (_unset, _OFF),
    "trainer.rollout_data_dir": (_unset, "rollouts.jsonl is always written in the run's folder"),
    "trainer.validation_data_dir": (_unset, _OFF),
    "trainer.use_legacy_worker_impl": (_any, "a switch inside verl"),
    "reward_model.enable": (_unset, "no reward model, as here"),
    "reward_model.reward_manager": (_is("naive", "dapo", "batch"), "algorithm.overlong_buffer has dapo's part"),
    "reward_model.launch_reward_fn_async": (_any, "rewards run beside the log-prob passes; same numbers"),
    "reward_model.use_reward_loop": (_any, "a switch inside verl"),
    "reward_model.sandbox_fusion.url": (_unset, _OFF),
    "reward.reward_manager.name": (_is("naive", "dapo", "batch"), "algorithm.overlong_buffer has dapo's part"),
    "reward.reward_model.enable": (_unset, "no reward model, as here"),
    "ray_init.num_cpus": (_is(None), "Ray's own count"),
    "ray_kwargs.ray_init.num_cpus": (_is(None), "Ray's own count"),
    "transfer_queue.enable": (_unset, _OFF),
}
"""verl's key -> (values that change nothing here, why)."""

_CRITICS_OWN: dict[str, tuple[Accepts, str]] = {
    CRITIC + "rollout_n": (_any, "rollout.n decides"),
    CRITIC + "forward_micro_batch_size": (_any, _PASS),
    CRITIC + "forward_micro_batch_size_per_gpu": (_any, _PASS),
    CRITIC + "forward_max_token_len_per_gpu": (_any, _PASS),
    CRITIC + "model.tokenizer_path": (_any, "the actor's tokenizer, as the tokens are the actor's"),
    CRITIC + "model.override_config": (_unset, _OFF),
    CRITIC + "kl_ctrl": (_any, "algorithm.kl_ctrl decides"),
}


def _critics() -> dict[str, tuple[Accepts, str]]:
    """What changes nothing in the actor's section changes nothing in the critic's."""
    like = [(ACTOR, CRITIC), (MODEL, CRITIC + "model.")]
    same = {
        new + key.removeprefix(old): why for old, new in like for key, why in NEUTRAL.items() if key.startswith(old)
    }
    mapped = {*RENAMED, *SPECIAL, *CHOICES}
    return {key: why for key, why in (same | _CRITICS_OWN).items() if key not in mapped}


NEUTRAL.update(_critics())

NEUTRAL_WITHIN: dict[str, tuple[str, str]] = {
    ACTOR + "profiler.": ("enable", "no profiler runs"),
    REF + "profiler.": ("enable", "no profiler runs"),
    ROLLOUT + "profiler.": ("enable", "no profiler runs"),
    ROLLOUT + "multi_turn.": ("enable", "one turn, as here"),
    ROLLOUT + "engine_kwargs.sglang.": ("", "the engine is vLLM"),
    ROLLOUT + "layer_name_map.": ("", "a switch inside verl"),
    REF + "profiler": ("enable", "no profiler runs"),
    "reward_model.model.": ("", "no reward model here (reward_model.enable is off)"),
}
"""Prefix of verl's keys -> (the leaf that must be off, why all others change nothing)."""

CURES: dict[str, str] = {
    ACTOR + "strategy": "remove it, or write megatron: FSDP is not offered, training runs through Megatron-Core",
    REF + "strategy": "remove it, or write megatron: FSDP is not offered, models run through Megatron-Core",
    ACTOR + "ppo_micro_batch_size": f"use {ACTOR}ppo_micro_batch_size_per_gpu, sequences of one rank",
    ACTOR + "optim.lr_warmup_steps_ratio": f"give {ACTOR}optim.lr_warmup_steps, a number of optimizer steps",
    ACTOR + "optim.min_lr": f"give {ACTOR}optim.min_lr_ratio, the last rate as a share of lr",
    ACTOR + "ulysses_sequence_parallel_size": "set it to 1: sequences are not split over ranks yet",
    ROLLOUT + "multi_turn.enable": "set it to false: responses have one turn here",
    MODEL + "lora_rank": "set it to 0: LoRA is not offered yet",
    "trainer.resume_mode": "write disable: runs cannot be resumed yet, and this one would start afresh",
    "trainer.val_only": "remove it and run `megatron-rl eval` with this config",
    "trainer.max_actor_ckpt_to_keep": "remove it: all saves are kept",
    "trainer.rollout_data_dir": "remove it: rollouts.jsonl is always written (trainer.num_logged_rollouts)",
    "trainer.log_val_generations": "remove it: rollouts.jsonl has samples (trainer.num_logged_rollouts)",
    "reward_model.enable": "set it to false, give reward.model.path, and name `model` in reward.function",
    "reward_model.reward_manager": "write naive, dapo or batch, and say what differs in the reward function",
    "defaults": "remove it: Hydra's lists of defaults are not read; give all files on the command line",
}
"""What to do about verl's keys that have an effect there and no counterpart here."""
