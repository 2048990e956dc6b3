"""Section `rollout`: the engine that generates, and how it samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import OneOf, section
from megatron_rl.engines import ENGINES, PATH_FORM

PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]


@section
class ValSamplingConfig:
    n: PositiveInt = 1
    """Samples per validation prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: PositiveShare = 1.0
    """Top-p of validation samples."""
    top_k: int = -1
    """Top-k of validation samples; -1 disables it."""
    pass_score: float = 1.0
    """Minimum score with which a validation sample counts as passed in pass@k."""


@section
class RolloutConfig:
    name: Annotated[str, OneOf(tuple(ENGINES), PATH_FORM)] = "vllm"
    """Engine: vllm, hf (transformers: slow, for comparison), fake (deterministic, without a model, for tests), or one
    of yours, by the path of its class."""
    n: PositiveInt = 8
    """Samples per prompt."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; engine and trainer compute log-probabilities at this temperature."""
    top_p: PositiveShare = 1.0
    """Top-p. Training requires 1: the trainer's probabilities are not renormalised."""
    top_k: int = -1
    """Top-k. Training requires -1 (disabled), for the same reason."""
    stop: list[str] = Field(default_factory=list)
    """Stop strings, in addition to the end-of-sequence tokens; one that is a special token of the tokenizer becomes a
    further stop token."""
    tp: PositiveInt = 1
    """Tensor parallelism (TP) size of one engine."""
    ep: PositiveInt = 1
    """Expert parallelism (EP) size of one engine: 1, each rank holds a part of every expert; or tp, each rank holds
    whole experts (vLLM's enable_expert_parallel)."""
    share_weights: bool = True
    """Let engine parameters share the trainer's memory if both store the same shard in the same layout and precision
    (vLLM; not with actor.param_offload). The other parameters are copied at each weight sync."""
    weight_sync: Literal["reshard", "full"] = "reshard"
    """How weights reach the engine: reshard sends only the bytes that the engine of a rank lacks; full gathers whole
    tensors on every rank, for comparison (no memory is shared then)."""
    sync_bucket_mb: PositiveInt = 256
    """Size of the staging buffer for weights sent between ranks, in MiB per rank."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the engine's parameters; model.dtype if unset."""
    gpu_memory_utilization: PositiveShare = 0.5
    """Fraction of GPU memory that the engine may use (vLLM; on CPU kv_cache_gb decides)."""
    kv_cache_gb: PositiveFloat | None = None
    """Size of the KV cache in GiB; if unset, 0.25 on CPU, what gpu_memory_utilization leaves on GPU."""
    max_model_len: PositiveInt | None = None
    """Maximum sequence length of the engine; data.max_prompt_length + data.max_response_length if unset."""
    max_num_seqs: PositiveInt = 256
    """Maximum sequences that the engine runs concurrently."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum tokens per engine step; the engine's default if unset."""
    decode: Literal["auto", "scheduler", "batch"] = "auto"
    """Who decides which sequences run in a step of vLLM: batch, a plan over all requests of a call, with no work in
    Python for a token; scheduler, vLLM's own; auto, batch where it can (full attention, no adapter in the engine, no
    stop texts, no top-p or top-k), else scheduler. The log says which, and why."""
    enforce_eager: bool = False
    """Disable CUDA graphs and compilation (always on CPU)."""
    free_cache_engine: bool = True
    """Free the KV cache during training."""
    seed_per_sample: bool = True
    """Use one seed per sample: samples then depend neither on the layout nor on the batch order."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of vLLM's constructor that change only speed and memory (block_size,
    enable_prefix_caching, compilation_config, ...); others are refused by name."""
    val: ValSamplingConfig = Field(default_factory=ValSamplingConfig)
    """Sampling of the validation set."""
