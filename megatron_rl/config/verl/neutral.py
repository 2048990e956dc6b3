"""verl's keys that have no counterpart here: which of their values change nothing, and what the others ask for.

Tables only. A value that is verl's own default changes nothing, or a rule says what is otherwise here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.config.verl.keys import ACTOR, CHOICES, CRITIC, MODEL, REF, RENAMED, ROLLOUT, SPECIAL

_OFF = "off, as here"
_SPEED = "speed and memory only: same numbers"
_PACKED = "sequences are packed here, without padding, unless actor.packing is false: same numbers"
_TRACES = "a profiler set up by verl's keys (trainer.profile.steps and trainer.profile.ranks trace with torch's)"
_PASS = "passes without gradients use actor.max_tokens_per_gpu: same numbers"
_TEXT = "text only here"
_SWITCH = "a switch inside verl"
_BACKEND = "training runs through Megatron-Core: settings of another backend change nothing"
_LAUNCH = "how verl starts its processes; cluster.* are the keys here"
_FAMILIES = "the model families are built in: code of a model folder never runs"
_WEIGHTS = "weights are always read from and written to Hugging Face form"
_FOLLOWS = "the reference runs as the actor does: same numbers"
_SAVES = "saves hold weights, tokenizer and config in Hugging Face form, whatever is listed here"


@dataclass(frozen=True)
class Verdict:
    """values: those that change nothing; None is all. lacks: what other values ask for. cure: what to do about them."""

    values: tuple[object, ...] | None
    why: str = ""
    lacks: str = ""
    cure: str = ""

    def accepts(self, value: object) -> bool:
        """`value` changes nothing here."""
        if self.values is None:
            return True
        if _unset(value) and all(_unset(one) for one in self.values):
            return True
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)


def _unset(value: object) -> bool:
    return value in (None, False, "", 0) or value == [] or value == {}


def every(why: str) -> Verdict:
    """All values change nothing."""
    return Verdict(None, why)


def only(*values: object, why: str = _OFF, lacks: str = "", cure: str = "") -> Verdict:
    """These values change nothing; others ask for what `lacks` names."""
    return Verdict(values, why, lacks, cure)


def off(lacks: str, cure: str = "") -> Verdict:
    """Null, false, 0 and nothing at all change nothing; others ask for what `lacks` names."""
    return Verdict((None,), _OFF, lacks, cure)


def _at(prefixes: tuple[str, ...], block: Mapping[str, Verdict]) -> dict[str, Verdict]:
    return {prefix + leaf: verdict for prefix in prefixes for leaf, verdict in block.items()}


_BACKENDS = ("fsdp", "fsdp2", "fsdp_turbo", "veomni", "torchtitan", "automodel")
BACKEND = only(
    "megatron",
    None,
    why="training runs through Megatron-Core",
    lacks="another training backend",
    cure="remove it: training runs through Megatron-Core",
)
OTHER_BACKEND = only(
    *_BACKENDS,
    why="training runs through Megatron-Core: the same losses and updates; split models that do not fit with actor.tp "
    "or actor.pp, as there is no FSDP",
)

_DATA: dict[str, Verdict] = {
    "tokenizer": off("a tokenizer of its own", "give actor_rollout_ref.model.tokenizer_path"),
    "use_shm": every(_SPEED),
    "train_max_samples": only(-1, None, why="all rows, as here", lacks="a limit on the rows", cure="cut the file"),
    "val_max_samples": only(-1, None, why="all rows, as here", lacks="a limit on the rows", cure="cut the file"),
    "return_raw_input_ids": every(_SWITCH),
    "return_full_prompt": every("prompts are kept as text and tokens here"),
    "return_raw_chat": every(_SWITCH),
    "return_multi_modal_inputs": every(_TEXT),
    "image_key": only("images", None, why=_TEXT, lacks="images", cure="leave it out: models are text only"),
    "video_key": only("videos", None, why=_TEXT, lacks="videos", cure="leave it out: models are text only"),
    "audio_key": only("audios", None, why=_TEXT, lacks="audio", cure="leave it out: models are text only"),
    "image_patch_size": every(_TEXT),
    "mm_processor_kwargs": off("images or audio"),
    "dataloader_num_workers": every(_SPEED),
    "validation_shuffle": every("validation covers all rows in any order"),
    "trust_remote_code": every(_FAMILIES),
    "custom_cls.path": off("a data class of the user's own", "write rows in verl's schema (docs/data.md)"),
    "custom_cls.name": every("read with custom_cls.path only"),
    "sampler.class_path": off("a sampler of the user's own"),
    "sampler.class_name": every("read with sampler.class_path only"),
    "datagen.path": off("data generated during the run"),
    "datagen.name": every("read with datagen.path only"),
    "tool_config_path": off("tools and several turns"),
    "function_tool_path": off("tools and several turns"),
    "balance_dp_token": every("ranks are always balanced by tokens: same numbers"),
    "pad_mode": every(_PACKED),
    "use_dynamic_bsz": every("micro-batches are always filled by tokens: same numbers"),
    "ignore_input_ids_mismatch": only(
        False,
        lacks="training on joined turns that the chat template renders otherwise",
        cure="set it to false: conversations are rendered whole here",
    ),
    "micro_batch_size": off("a micro-batch over all ranks", "give data.micro_batch_size_per_gpu"),
}
_MODEL: dict[str, Verdict] = {
    "use_shm": every(_SPEED),
    "external_lib": off("a Python module to load first"),
    "hf_config_path": off("a config.json in another folder", "copy it into the model's folder"),
    "override_config.attention_dropout": only(0, 0.0, None, why="no dropout, as here", lacks="dropout in training"),
    "override_config.embd_pdrop": only(0, 0.0, None, why="no dropout, as here", lacks="dropout in training"),
    "override_config.resid_pdrop": only(0, 0.0, None, why="no dropout, as here", lacks="dropout in training"),
    "override_config.attn_implementation": every(_SPEED),
    "override_config.use_cache": every(_SWITCH),
    "override_config.moe_config.freeze_moe_router": off("a router that is not trained (freeze_moe_router)"),
    "enable_activation_offload": every(_SPEED),
    "use_remove_padding": every(_PACKED),
    "truncate_padding": every(_PACKED),
    "use_liger": every(_SPEED),
    "use_fused_kernels": every(_SPEED),
    "trust_remote_code": every(_FAMILIES),
    "lora_rank": off("LoRA of a critic", "set it to 0: only the actor has adapters"),
    "lora_alpha": every("read with LoRA only"),
    "target_modules": every("read with LoRA only"),
    "target_parameters": every("read with LoRA only"),
    "exclude_modules": every("read with LoRA only"),
    "lora_adapter_path": off("LoRA of a critic", "merge the adapter into the model first"),
    "strategy": every(_BACKEND),
}
_OPTIM: dict[str, Verdict] = {
    "name": only("AdamW", "Adam", None, why="AdamW, as here", lacks="another optimizer", cure="write AdamW"),
    "decay_type": every("the name of the schedule decides"),
    "min_lr_factor": only(0, 0.0, None, why="the rate falls to 0", lacks="a last rate", cure="use min_lr_ratio"),
    "total_training_steps": only(
        -1, None, why="the run's steps, as here", lacks="a schedule of its own length", cure="use lr_decay_steps"
    ),
    "optimizer": only(
        "adam", "AdamW", "adamw", "Adam", why="AdamW, as here", lacks="another optimizer", cure="write adam"
    ),
    "optimizer_impl": only(
        "torch.optim", None, why="AdamW, as here", lacks="another optimizer", cure="write torch.optim"
    ),
    "lr_warmup_init": only(0, 0.0, None, why="the rate rises from 0, as here", lacks="a warm-up from another rate"),
    "weight_decay_incr_style": only("constant", None, why="constant, as here", lacks="a weight decay that changes"),
    "num_cycles": only(0.5, None, why="half a cosine, as here", lacks="a cosine of several cycles"),
    "use_checkpoint_opt_param_scheduler": every("there are no checkpoints to take a schedule from"),
    "lr_wsd_decay_style": every("read with the schedule WSD only"),
    "lr_wsd_decay_steps": every("read with the schedule WSD only"),
    "zero_indexed_step": every("each update has a rate above 0 here, the first one of a warm-up too"),
    "use_precision_aware_optimizer": off("a precision-aware optimizer"),
    "use_layer_wise_distributed_optimizer": off("the optimizer Muon"),
    "override_optimizer_config": off("optimizer settings beside those of actor.optim"),
    "override_optimizer_config.optimizer_cpu_offload": off("an optimizer that steps on the CPU"),
    "override_optimizer_config.use_precision_aware_optimizer": off("a precision-aware optimizer"),
    "override_optimizer_config.optimizer_offload_fraction": every("read with optimizer_cpu_offload only"),
    "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": every("read with optimizer_cpu_offload only"),
    "override_optimizer_config.decoupled_weight_decay": only(True, None, why="decoupled, as here", lacks="plain Adam"),
    "lr_min": only(0, 0.0, None, why="the rate falls to 0, as here", lacks="VeOmni's lowest rate"),
    "lr_start": only(0, 0.0, None, why="the rate rises from 0, as here", lacks="VeOmni's first rate"),
    "lr_decay_ratio": only(1, 1.0, None, why="the whole run, as here", lacks="VeOmni's share of decay"),
    **{
        name: every("read by the precision-aware optimizer only")
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
    },
}
_TRAINED: dict[str, Verdict] = {
    "use_dynamic_bsz": every("micro-batches are always filled by tokens: same numbers"),
    "ppo_micro_batch_size": off("a micro-batch over all ranks", "use ppo_micro_batch_size_per_gpu, of one rank"),
    "shuffle": off("mini-batches in another order than the batch"),
    "data_loader_seed": every("mini-batches are not shuffled here"),
    "loss_scale_factor": off("another constant in seq-mean-token-sum-norm"),
    "rollout_n": every("rollout.n decides"),
    "use_torch_compile": every(_SPEED),
    "use_remove_padding": every(_PACKED),
    "use_fused_kernels": every(_SPEED),
    "use_prefix_grouper": every(_SPEED),
    "entropy_from_logits_with_chunking": every(_SPEED),
    "entropy_from_logits_chunk_size": every(_SPEED),
    "entropy_checkpointing": every(_SPEED),
    "pad_to_length": every(_PACKED),
    "calculate_entropy": every("entropy is always measured"),
    "calculate_sum_pi_squared": every("read by optimal_token_baseline only"),
    "sum_pi_squared_checkpointing": every("read by optimal_token_baseline only"),
    "freeze_vision_tower": every(_TEXT),
    "load_weight": only(True, why="weights are always loaded", lacks="random weights", cure="set model.init=random"),
    "nccl_timeout": every("cluster.step_timeout_s is the deadline here"),
    "checkpoint.async_save": every("saves are written before the run goes on"),
    **{
        f"policy_loss.{name}": every("read by losses that are not offered")
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    },
}
_MEGATRON: dict[str, Verdict] = {
    "use_dist_checkpointing": off("weights in Megatron's checkpoint form", "export them to Hugging Face form first"),
    "dist_checkpointing_path": every("read with use_dist_checkpointing only"),
    "dist_checkpointing_prefix": every("read with use_dist_checkpointing only"),
    "dist_ckpt_optim_fully_reshardable": every("there are no checkpoints of the optimizer"),
    "distrib_optim_fully_reshardable_mem_efficient": every("there are no checkpoints of the optimizer"),
    "use_mbridge": every(_WEIGHTS),
    "vanilla_mbridge": every(_WEIGHTS),
    "use_remove_padding": every(_PACKED),
    "pad_bshd_to_minibatch_max": every(_PACKED),
    "pad_to_length": every(_PACKED),
    "pad_to_length_bucket": every(_PACKED),
    "entropy_from_logits_with_chunking": every(_SPEED),
    "entropy_from_logits_chunk_size": every(_SPEED),
    "seed": every("nothing is drawn on the workers: no dropout"),
    "forward_only": every(_SWITCH),
    "dynamic_context_parallel": off("context parallelism that changes from batch to batch"),
    "max_seqlen_per_dp_cp_rank": every("read with dynamic_context_parallel only"),
    "use_megatron_fsdp": off("Megatron-FSDP"),
    "override_ddp_config": off("settings of Megatron's data parallelism"),
    "override_ddp_config.grad_reduce_in_fp32": every("gradients are added up in float32"),
    "override_ddp_config.average_in_collective": every("a sum over all tokens either way"),
    "override_ddp_config.use_distributed_optimizer": every("megatron.use_distributed_optimizer decides"),
    "override_transformer_config": off("fields of Megatron's TransformerConfig"),
    "override_mcore_model_config": off("fields of Megatron's model config"),
    **{
        f"offload.{what}.target": only(None, "none", lacks="offload to disk", cure="write cpu, or remove it")
        for what in ("param", "grad", "optimizer")
    },
    "offload.disk.path": every("read with offload to disk only"),
    "offload.disk.chunk_size_mb": every("read with offload to disk only"),
    "offload.disk.cleanup_on_exit": every("read with offload to disk only"),
}
_T = "override_transformer_config."
_TRANSFORMER: dict[str, Verdict] = {
    **{
        _T + name: every(_SPEED)
        for name in (
            "recompute_modules", "recompute_method", "recompute_num_layers", "distribute_saved_activations",
            "attention_backend", "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion",
            "bias_swiglu_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion", "persist_layer_norm",
            "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "deallocate_pipeline_outputs",
            "moe_permute_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep",
            "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_shared_expert_overlap", "moe_router_fusion",
            "moe_hybridep_num_sms", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "overlap_p2p_comm",
            "batch_p2p_comm", "batch_p2p_sync", "tp_comm_overlap", "use_cpu_initialization", "enable_cuda_graph",
            "cuda_graph_impl", "async_tensor_model_parallel_allreduce", "use_ring_exchange_p2p",
            "fused_single_qkv_rope", "memory_efficient_layer_norm", "fine_grained_activation_offloading",
            "offload_modules", "cp_comm_type", "variable_seq_lengths", "moe_layer_recompute",
        )
    },
    _T + "moe_router_dtype": only("fp32", None, why="the router counts in float32, as here", lacks="another precision"),
    _T + "moe_aux_loss_coeff": off("a balancing loss of the experts", "set it to 0, as most RL runs do"),
    _T + "moe_z_loss_coeff": off("a z loss of the router", "remove it"),
    _T + "moe_router_load_balancing_type": every("there is no balancing loss here"),
    _T + "moe_router_bias_update_rate": off("a router bias that balances the experts"),
    _T + "attention_dropout": off("dropout in training"),
    _T + "hidden_dropout": off("dropout in training"),
    _T + "attention_softmax_in_fp32": only(True, None, why="float32, as here", lacks="a softmax in bfloat16"),
    _T + "calculate_per_token_loss": every("loss_agg_mode decides, over the global mini-batch"),
    _T + "fp8": off("FP8 training"),
    _T + "fp4": off("FP4 training"),
    _T + "mtp_num_layers": off("multi-token prediction (MTP)"),
    _T + "pipeline_model_parallel_layout": off(
        "a layout of the pipeline of the user's own",
        "use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    ),
    _T + "account_for_embedding_in_pipeline_split": off("embeddings that count as a layer of the pipeline"),
    _T + "account_for_loss_in_pipeline_split": off("the loss as a layer of the pipeline"),
}  # fmt: skip
_REFERENCE: dict[str, Verdict] = {
    "fsdp_config.param_offload": every("the reference stays on the device here: same numbers, more memory"),
    "megatron.param_offload": every("the reference stays on the device here: same numbers, more memory"),
    "megatron.offload.param.target": every("the reference stays on the device here: same numbers, more memory"),
    "megatron.grad_offload": every("the reference has no gradients"),
    "megatron.optimizer_offload": every("the reference has no optimizer"),
    "megatron.use_distributed_optimizer": every("the reference has no optimizer"),
    "megatron.dtype": only("bfloat16", None, why="as the actor's", lacks="another precision of the reference"),
    "fsdp_config.dtype": only("bfloat16", None, why="as the actor's", lacks="another precision of the reference"),
    "ulysses_sequence_parallel_size": every(_FOLLOWS),
    "fsdp_config.ulysses_sequence_parallel_size": every(_FOLLOWS),
    "model": only(None, why="the actor's starting weights, as here", lacks="a model given as one value"),
    "model.override_config": every(_FOLLOWS),
    "log_prob_micro_batch_size": every(_PASS),
    "log_prob_micro_batch_size_per_gpu": every(_PASS),
    "log_prob_use_dynamic_bsz": every(_PASS),
    "log_prob_max_token_len_per_gpu": every(_PASS),
}
_ROLLOUT: dict[str, Verdict] = {
    "mode": only(
        "sync", "async", None, why="the engine runs in the worker; steps are the same", lacks="another way to generate"
    ),
    "nnodes": off("engines on nodes of their own"),
    "n_gpus_per_node": every("read with rollout.nnodes only"),
    "ignore_eos": off("responses that go on after their end (ignore_eos)"),
    "do_sample": only(True, None, why="sampling, as here", lacks="training on greedy responses"),
    "use_fire_sampling": off("FIRE sampling"),
    "repetition_penalty": only(1, 1.0, None, lacks="a repetition penalty"),
    "enable_chunked_prefill": every("the engine's own choice: same samples"),
    "enable_prefix_caching": every("the engine's own choice: same samples"),
    "cudagraph_capture_sizes": every(_SPEED),
    "scheduling_policy": every(_SPEED),
    "full_determinism": off("kernels that give the same bits in every batch"),
    "seed": every("trainer.seed decides"),
    "load_format": every("the engine's weights come from the trainer"),
    "layered_summon": every("the engine's weights come from the trainer"),
    "update_weights_bucket_megabytes": every(_SPEED),
    "checkpoint_engine.backend": only(
        "naive", None, why="engines share the trainer's ranks, as here", lacks="engines apart from the trainer"
    ),
    "data_parallel_size": only(1, None, why="one engine a rank group, as here", lacks="data parallelism in one engine"),
    "expert_parallel_size": only(1, None, why="each engine holds all experts, as here", lacks="EP in one engine"),
    "pipeline_model_parallel_size": only(1, None, lacks="pipeline stages in one engine"),
    "moe_tensor_parallel_size": only(1, None, lacks="tensor parallelism of experts in one engine"),
    "calculate_log_probs": every("the engine's log-probabilities are always kept and compared"),
    "logprobs_mode": only(
        "processed_logprobs", None, why="at the sampling temperature, as here", lacks="other log-probabilities"
    ),
    "log_prob_micro_batch_size": every(_PASS),
    "log_prob_micro_batch_size_per_gpu": every(_PASS),
    "log_prob_use_dynamic_bsz": every(_PASS),
    "log_prob_max_token_len_per_gpu": every(_PASS),
    "disable_log_stats": every("logging of the engine only"),
    "over_sample_rate": off("more requests than are kept (over_sample_rate)"),
    "multi_stage_wake_up": every(_SPEED),
    "skip_rollout": off("rollouts read from disk"),
    "skip_dump_dir": every("read with skip_rollout only"),
    "skip_tokenizer_init": every("tokens in, tokens out, here too"),
    "chat_scheduler": off("a chat scheduler"),
    "limit_images": every(_TEXT),
    "quantization": off("a quantized engine (FP8 and others)"),
    "quantization_config_file": off("a quantized engine (FP8 and others)"),
    "use_block_quant_rollout": every("read with quantization only"),
    "cast_to_rollout_dtype": every("the engine's weights have rollout.dtype"),
    "enable_rollout_routing_replay": off("router replay"),
    "moe_load_balance_metrics_interval": every("metrics of the engine only"),
    "router_config_path": off("a router between engines"),
    "mtp": off("multi-token prediction (MTP)"),
    "qat": off("quantization-aware training (QAT)"),
    "engine_kwargs": only(None, why="nothing in it"),
    "engine_kwargs.swap_space": only(None, why="the engine's default", lacks="a swap space"),
    "agent.num_workers": every(_SPEED),
    "agent.default_agent_loop": only(
        "single_turn_agent", None, why="one turn, as here", lacks="tools and several turns", cure="remove it"
    ),
    "agent.agent_loop_config_path": off("an agent loop of the user's own"),
    "agent.custom_async_server.path": off("an engine server of the user's own"),
    "agent.custom_async_server.name": every("read with custom_async_server.path only"),
}
_REWARD_MANAGERS = only(
    "naive", "dapo", "batch", None,
    why="algorithm.overlong_buffer has dapo's part",
    lacks="another reward manager",
    cure="write naive, dapo or batch, and say what differs in the reward function",
)  # fmt: skip
_REWARD_MODEL = off(
    "a reward model in verl's form",
    "set it to false, give reward.model.path, and name `model` in reward.function (docs/rewards.md)",
)
_SANDBOX = off("Sandbox Fusion", "remove it: the reward `code` runs programs here (docs/rewards.md)")
_TRAINER: dict[str, Verdict] = {
    "balance_batch": every("ranks are always balanced by tokens: same numbers"),
    "val_only": off("validation alone", "remove it and run `megatron-rl eval` with this config"),
    "default_hdfs_dir": off("copies of saves on HDFS"),
    "del_local_ckpt_after_load": every("checkpoint.keep_last decides which are kept"),
    "esi_redundant_time": every("trainer.max_time is the deadline here"),
    "checkpoint_callback_class": off("a callback after saves"),
    "use_legacy_worker_impl": every(_SWITCH),
    "use_v1": every(_SWITCH),
    "v1.trainer_mode": only(
        "sync", None, why="in step, as here", lacks="asynchronous training", cure="write sync: steps are synchronous"
    ),
    "v1.sampler.custom_sampler.path": off("a sampler of the user's own"),
    "profile_interval": only([-1, -1], None, lacks=_TRACES),
    "profile_steps": off(_TRACES),
    "npu_profile": off(_TRACES),
}
_SINGLE: dict[str, Verdict] = {
    "actor_rollout_ref.hybrid_engine": only(
        True, None, why="actor and engine share their ranks", lacks="engines apart from the trainer"
    ),
    "actor_rollout_ref.nccl_timeout": every("cluster.step_timeout_s is the deadline here"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": only(1, None),
    "algorithm.filter_groups": off("a filter given as one value"),
    "algorithm.filter_groups.max_inflight_gen_batches": every(_SPEED),
    "algorithm.use_pf_ppo": off("PF-PPO"),
    "algorithm.rollout_correction": off("a correction given as one value", "set algorithm.rollout_correction.*"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": off("importance weights divided by their mean"),
    "algorithm.rollout_correction.use_policy_gradient": off(
        "the loss without a ratio", "remove it and set actor.loss_mode=reinforce"
    ),
    "algorithm.rollout_correction.loss_type": only(
        "ppo_clip", None, why="actor.loss_mode decides", lacks="another loss", cure="set actor.loss_mode"
    ),
    "reward_model.overlong_buffer.log": every("always logged"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": every("always logged"),
    "reward_model.reward_kwargs.max_resp_len": every("data.max_response_length decides"),
    "reward.reward_kwargs.overlong_buffer_cfg.log": every("always logged"),
    "reward.reward_kwargs.max_resp_len": every("data.max_response_length decides"),
    "reward_model.enable": _REWARD_MODEL,
    "reward.reward_model.enable": _REWARD_MODEL,
    "reward_model.sandbox_fusion.url": _SANDBOX,
    "reward.sandbox_fusion.url": _SANDBOX,
    "sandbox_fusion.url": _SANDBOX,
    "reward_model.reward_manager": _REWARD_MANAGERS,
    "reward_manager.name": _REWARD_MANAGERS,
    "reward.reward_manager.name": _REWARD_MANAGERS,
    **{
        key: only("register", None, why="a manager by its name", lacks="a reward manager of the user's own")
        for key in ("reward_model.reward_loop_source", "reward_manager.source", "reward.reward_manager.source")
    },
    **{
        key: off("a reward manager of the user's own", "give custom_reward_function.path")
        for key in ("reward_model.reward_loop_module_path", "reward_manager.module.path")
    },
    "reward.reward_manager.module.path": off(
        "a reward manager of the user's own", "give reward.custom_reward_function.path"
    ),
    "reward_manager.module.name": every("read with module.path only"),
    "reward.reward_manager.module.name": every("read with module.path only"),
    "model_engine": replace(BACKEND, values=("megatron", "dp", *_BACKENDS, None), why="actor.strategy says it too"),
    "use_remove_padding": every(_PACKED),
}

NEUTRAL: dict[str, Verdict] = {
    **_at(("data.",), _DATA),
    **_at((MODEL, CRITIC + "model.", REF + "model."), _MODEL),
    **_at(
        (CRITIC + "model.", REF + "model."),
        {"override_config": off("changes to config.json", "write them into the model's config.json")},
    ),
    **_at((ACTOR + "optim.", CRITIC + "optim."), _OPTIM),
    **_at((ACTOR, CRITIC, REF), _TRAINED),
    **_at((ACTOR + "megatron.", CRITIC + "megatron.", REF + "megatron."), _MEGATRON | _TRANSFORMER),
    **_at((REF,), _REFERENCE),
    **_at((ROLLOUT,), _ROLLOUT),
    **_at(("trainer.",), _TRAINER),
    **_SINGLE,
    CRITIC + "forward_micro_batch_size": every(_PASS),
    CRITIC + "forward_micro_batch_size_per_gpu": every(_PASS),
    CRITIC + "forward_max_token_len_per_gpu": every(_PASS),
    CRITIC + "model.tokenizer_path": every("the actor's tokenizer, as the tokens are the actor's"),
    **_at((CRITIC + "model.", REF + "model."), {"custom_chat_template": off("a chat template of its own")}),
    CRITIC + "megatron.use_distributed_optimizer": every("as the actor's: same numbers"),
    CRITIC + "megatron.dtype": only("bfloat16", None, why="as the actor's", lacks="another precision of the critic"),
    CRITIC + "kl_ctrl": every("algorithm.kl_ctrl decides"),
    REF + "model.path": every("not given"),
}
"""verl's key -> its verdict, where it has no counterpart here."""
for _key in {*RENAMED, *SPECIAL, *CHOICES}:
    NEUTRAL.pop(_key, None)


@dataclass(frozen=True)
class KeyGroup:
    """A section of verl whose keys change nothing as long as its switches are off. switches: leaf -> values that are
    off. lacks: what it is when on.
    """

    why: str
    switches: tuple[str, ...] = ()
    off: tuple[object, ...] = (None, False, 0, "", "disabled", "none")
    lacks: str = ""


_BACKEND_SECTIONS = ("fsdp_config.", "fsdp.", "veomni.", "torchtitan.", "automodel.", "mindspeed.", "mindspeedllm.")
_TRAINING = (ACTOR, REF, CRITIC)
_ENGINES = tuple(
    part + engine for part in (*_TRAINING, CRITIC + "model.") for engine in ("", "fsdp_config.", "fsdp.", "megatron.")
)
_PROFILER = KeyGroup("no profiler runs", ("enable",), lacks=_TRACES)
_MTP = KeyGroup("off, as here", ("enable", "enable_train", "enable_rollout"), lacks="multi-token prediction (MTP)")
_QAT = KeyGroup("off, as here", ("enable",), lacks="quantization-aware training (QAT)")
_SKIP = KeyGroup("off, as here", ("enable",), lacks="rollouts read from disk")
_READ_BY_REWARD_MODEL = KeyGroup("read by a reward model only (reward_model.enable is off)")

GROUPS: dict[str, KeyGroup] = {
    **{f"{part}qat.": _QAT for part in (*_ENGINES, ROLLOUT)},
    **dict.fromkeys(
        (f"{part}router_replay." for part in _ENGINES),
        KeyGroup("off, as here", ("mode",), lacks="router replay (R2, R3)"),
    ),
    **{part + name: KeyGroup(_BACKEND) for part in (*_TRAINING, CRITIC + "model.") for name in _BACKEND_SECTIONS},
    MODEL + "fsdp_config.": KeyGroup(_BACKEND),
    **{f"{part}profiler.": _PROFILER for part in (ACTOR, REF, CRITIC, ROLLOUT, "reward_model.", "")},
    "global_profiler.": KeyGroup("no profiler runs", ("steps",), lacks=_TRACES),
    **{f"{part}mtp.": _MTP for part in (MODEL, CRITIC + "model.", ROLLOUT)},
    **{
        f"{part}lora.": KeyGroup("no LoRA, as here", ("rank", "adapter_path"), lacks="LoRA of a critic")
        for part in (MODEL, CRITIC + "model.")
    },
    **{f"{part}tiled_mlp.": KeyGroup(_SPEED) for part in (MODEL, CRITIC + "model.")},
    **{f"{part}fused_kernel_options.": KeyGroup(_SPEED) for part in (MODEL, CRITIC + "model.")},
    **{f"{part}checkpoint.": KeyGroup(_SAVES) for part in (ACTOR, CRITIC, "", "trainer.")},
    **{f"{part}optim.muon_": KeyGroup("read by the optimizer Muon only") for part in (ACTOR, CRITIC)},
    ROLLOUT + "multi_turn.": KeyGroup("one turn, as here", ("enable",), lacks="tools and several turns"),
    ROLLOUT + "engine_kwargs.sglang": KeyGroup("the engine is vLLM"),
    ROLLOUT + "engine_kwargs.trtllm": KeyGroup("the engine is vLLM"),
    ROLLOUT + "layer_name_map.": KeyGroup(_SWITCH),
    ROLLOUT + "trace.": KeyGroup("off, as here", ("backend",), lacks="traces of rollouts (weave, mlflow)"),
    ROLLOUT + "prometheus.": KeyGroup("off, as here", ("enable",), lacks="engine metrics for Prometheus"),
    ROLLOUT + "skip.": _SKIP,
    **{f"skip.{name}.": _SKIP for name in ("rollout", "rollout_tq", "async_rollout")},
    "skip.": KeyGroup("off, as here"),
    REF + "optim.": KeyGroup("the reference has no optimizer"),
    ROLLOUT + "disaggregation.": KeyGroup("off, as here", ("enabled",), lacks="prefill and decode on engines apart"),
    ROLLOUT + "checkpoint_engine.": KeyGroup("the engine's weights come from the trainer"),
    "distillation.": KeyGroup("off, as here", ("enabled",), lacks="on-policy distillation"),
    "algorithm.pf_ppo.": KeyGroup("read with PF-PPO only"),
    "transfer_queue.": KeyGroup("how verl moves rows between its processes: same numbers"),
    "ray_kwargs.": KeyGroup(_LAUNCH),
    "ray_init.": KeyGroup(_LAUNCH),
    "hydra.": KeyGroup(_LAUNCH),
    "trainer.v1.": KeyGroup("read by asynchronous training only"),
    "async_training.": KeyGroup("", ("",), off=(), lacks="asynchronous training"),
    "reward_model.": _READ_BY_REWARD_MODEL,
    "reward.reward_model.": _READ_BY_REWARD_MODEL,
    "reward_manager.": KeyGroup(_SWITCH),
    "reward.reward_manager.": KeyGroup(_SWITCH),
    "reward.sandbox_fusion.": KeyGroup("read by Sandbox Fusion only"),
    "sandbox_fusion.": KeyGroup("read by Sandbox Fusion only"),
    "data.multiturn.": KeyGroup("rows of messages are recognised by their column"),
    "engine.": KeyGroup(_BACKEND),
}
"""Prefix of verl's keys -> what the section is. The longest prefix that fits counts."""

STRICT: dict[str, str] = {
    **{f"{part}megatron.override_transformer_config.": "a field of Megatron's TransformerConfig" for part in _TRAINING},
    **{f"{part}megatron.override_ddp_config.": "a setting of Megatron's data parallelism" for part in _TRAINING},
    **{f"{part}optim.override_optimizer_config.": "an optimizer setting" for part in _TRAINING},
    **{f"{part}megatron.override_mcore_model_config.": "a field of Megatron's model" for part in _TRAINING},
    **{f"{part}override_config.": "a change to config.json" for part in (CRITIC + "model.", REF + "model.")},
}
"""Prefix of verl's keys whose own names are another library's -> what a name that is not known here asks for."""
