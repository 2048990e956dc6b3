"""vLLM in the worker's own process.

Its keywords are an allow-list: what an engine computes is set by this project's own keys or by the model, and a keyword
of a later vLLM is refused until somebody has looked at what it does.
"""

from __future__ import annotations

from megatron_rl.engines.record import OPTIONAL_SETTINGS, Engine

SPEED = frozenset({
    # how sequences are scheduled and memory is laid out
    "block_size", "enable_prefix_caching", "prefix_caching_hash_algo", "enable_chunked_prefill",
    "num_gpu_blocks_override",
    "max_num_scheduled_tokens", "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills",
    "scheduler_reserve_full_isl", "watermark", "disable_hybrid_kv_cache_manager", "async_scheduling", "stream_interval",
    "scheduling_policy", "swap_space",
    # which kernels compute the same numbers, and how they are compiled
    "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cuda_graph_sizes",
    "optimization_level",
    "performance_mode", "attention_backend", "disable_cascade_attn", "moe_backend", "linear_backend", "all2all_backend",
    "enable_flashinfer_autotune", "disable_custom_all_reduce",
    # start and logs
    "max_parallel_loading_workers", "use_tqdm_on_load", "distributed_timeout_seconds",
    "cpu_distributed_timeout_seconds",
    "disable_log_stats", "aggregate_engine_logging", "enable_logging_iteration_details", "log_level",
    "show_hidden_metrics_for_version", "otlp_traces_endpoint", "collect_detailed_traces", "kv_cache_metrics",
    "kv_cache_metrics_sample", "cudagraph_metrics", "enable_mfu_metrics", "jit_monitor_mode", "jit_monitor_verbose",
})  # fmt: skip
"""Keywords that are handed through."""

OURS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer_path",
    "hf_config_path": "model.path",
    "dtype": "rollout.dtype",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gb",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "seed": "trainer.seed",
    "tensor_parallel_size": "rollout.tp",
    "enable_expert_parallel": "rollout.ep",
    "enable_return_routed_experts": "actor.router_replay",
    "override_generation_config": "rollout.temperature, rollout.top_p, rollout.top_k and rollout.stop",
    "generation_config": "rollout.temperature, rollout.top_p, rollout.top_k and rollout.stop",
}
"""Keywords that a key of ours sets."""

_LAYOUT = (
    "pipeline_parallel_size", "data_parallel_", "context_parallel_size", "distributed_executor_backend", "device_ids",
    "master_", "nnodes", "node_rank", "expert_placement_strategy", "eplb", "elastic_ep", "worker_",
)  # fmt: skip
_MEANING = (
    "logprobs", "quantization", "kv_cache_dtype", "hf_overrides", "lora", "rope_", "sliding_window", "model_impl",
    "model_class", "revision", "load_format", "logits_processors", "spec", "trust_remote_code", "convert", "runner",
)  # fmt: skip


def why_refused(keyword: str) -> tuple[str, str] | None:
    """(reason, cure) where the keyword may not be given; None where it may."""
    if keyword in SPEED:
        return None
    if keyword in OURS:
        return f"{OURS[keyword]} sets this", f"remove it, and set {OURS[keyword]}"
    if any(part in keyword for part in _LAYOUT):
        return (
            "sets the engine's layout, which is rollout.tp ranks of the actor's; other placements are not offered",
            "remove it; rollout.tp decides",
        )
    if any(part in keyword for part in _MEANING):
        return (
            "changes what the engine computes, and its log-probabilities would no longer mean what the trainer's do",
            "remove it; engine and trainer then have one model, in the precision of rollout.dtype",
        )
    return (
        "is not among the keywords that are known to change speed or memory alone",
        f"remove it; these may be given: {', '.join(sorted(SPEED))}",
    )


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that its kernels are made for; an adapter of another rank is padded to the next."""


def adapter_arguments(rank: int) -> dict[str, object]:
    """Keywords of an engine that holds one adapter of a rank."""
    most = min(one for one in ADAPTER_RANKS if one >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": most}


ENGINE = Engine(
    name="vllm",
    implementation="megatron_rl.rollout.vllm_engine:VllmEngine",
    parameters="fused",
    package="vllm",
    imports=("vllm", "vllm.entrypoints.llm", "vllm.v1.worker.gpu_model_runner"),
    multi_rank=True,
    deals_experts=True,
    returns_experts=True,
    cpu_lacks={
        "rollout.ep": "vLLM's CPU build ends in an error with whole experts on each rank",
        "actor.router_replay": "vLLM's CPU build does not return the experts that tokens went to",
    },
    shares_weights=True,
    settings=frozenset(OPTIONAL_SETTINGS),
    refuse_keyword=why_refused,
    adapter_ranks=ADAPTER_RANKS,
    latent_dims=(320, 512, 576),
    cpu_latent_dims=(576,),
    cpu_latent_ropes=("yarn",),
    head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    derives_head_dim=frozenset({"Qwen2ForCausalLM", "Qwen2MoeForCausalLM"}),
)
