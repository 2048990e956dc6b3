"""Section `rollout`: the engine that generates, and how it samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import OneOf, section
from megatron_rl.engines import ENGINES

PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]


@section
class ValSamplingConfig:
    n: PositiveInt = 1
    """Samples per validation prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: PositiveShare = 1.0
    """Nucleus of validation samples."""
    top_k: int = -1
    """Most likely tokens kept in validation; -1 keeps all."""
    pass_score: float = 1.0
    """A validation sample counts as passed in pass@k with at least this score."""


@section
class RolloutConfig:
    name: Annotated[str, OneOf(tuple(ENGINES))] = "vllm"
    """Engine: vllm, hf (transformers: slow, for comparison), or fake (deterministic, without a model, for tests)."""
    n: PositiveInt = 8
    """Samples per prompt."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are taken at it on both sides."""
    top_p: PositiveShare = 1.0
    """Nucleus; training refuses values below 1: the trainer does not renormalise probabilities as they do."""
    top_k: int = -1
    """Most likely tokens kept; -1 keeps all. Training refuses other values, for the same reason."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, beside the end-of-sequence tokens; one that is a special token of the tokenizer works
    as a further end token."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks of one engine."""
    share_weights: bool = True
    """Make engine parameters the trainer's own memory where both hold the same part in the same order and precision
    (vLLM; not with actor.param_offload). The others are copied at each sync."""
    weight_sync: Literal["reshard", "full"] = "reshard"
    """How weights reach the engine: reshard moves what a rank's engine lacks and nothing else; full gathers every
    tensor whole on every rank, for comparison (nothing is shared then)."""
    sync_bucket_mb: PositiveInt = 256
    """Staging memory for weights that go from rank to rank, in MiB a rank."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the engine's weights; model.dtype when not given."""
    gpu_memory_utilization: PositiveShare = 0.5
    """Share of the GPU's memory that the engine may use (vLLM; on CPU kv_cache_gb decides)."""
    kv_cache_gb: PositiveFloat | None = None
    """Exact size of the KV cache in GiB; on CPU 0.25 when not given."""
    max_model_len: PositiveInt | None = None
    """Longest sequence of the engine; data.max_prompt_length + data.max_response_length when not given."""
    max_num_seqs: PositiveInt = 256
    """Most sequences that the engine advances at once."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens in one engine step; the engine's own default when not given."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation (always so on CPU)."""
    free_cache_engine: bool = True
    """Give the KV cache's memory back while the actor trains."""
    seed_per_sample: bool = True
    """Give each sample a seed of its own, so that samples depend neither on the layout nor on batch order."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keywords for vLLM's constructor: those that change speed and memory alone (block_size,
    enable_prefix_caching, enable_expert_parallel, compilation_config, ...); others are refused by name."""
    val: ValSamplingConfig = Field(default_factory=ValSamplingConfig)
    """Sampling of the validation set."""
