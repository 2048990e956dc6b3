"""What every rollout engine does. Token in, token out: an engine sees no text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_rl.errors import RolloutError
from megatron_rl.types import FinishReason


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same for all requests of one call."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    """Longest response; generation stops there with finish_reason "length"."""
    stop_token_ids: tuple[int, ...]
    """Ids that end a response; the id is kept as its last token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""


@dataclass(frozen=True)
class Request:
    """One prompt. seed: of its first sample (sample i has seed + i); None leaves sampling to the engine's stream."""

    token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True)
class Sample:
    """One response: what was sampled and with which probability.

    logprobs are log softmax(logits / temperature) of the sampled ids, before top-p and top-k; greedy sampling
    (temperature 0) reports them at temperature 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from; plain values, so that it travels to any process."""

    name: str
    model_path: str
    tokenizer_path: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    gpu_memory_utilization: float
    kv_cache_gb: float | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enforce_eager: bool
    free_cache_engine: bool
    seed: int
    needs_text: bool
    """Whether stop texts are used, which need the tokenizer inside the engine."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """An engine is built without weights; `update_weights` comes first, and again after each training step.

    Memory: between `sleep` and `wake` the engine holds no KV cache, and its weights may be gone; `update_weights`
    may be
    called asleep (the engine wakes what it needs) and `generate` only awake.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights it holds; -1 before the first update."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        """n samples per request, in order. RolloutError where a prompt and max_tokens pass max_model_len."""
        ...

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take every HF tensor; clears the prefix cache, whose entries are of the old weights."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def check_requests(requests: Sequence[Request], sampling: Sampling, max_model_len: int, weight_version: int) -> None:
    """Refuse what an engine would cut or answer wrongly. Raises RolloutError."""
    if weight_version < 0:
        raise RolloutError("generate before the first update_weights: the engine's weights are not the trainer's yet")
    for i, request in enumerate(requests):
        if not request.token_ids:
            raise RolloutError(f"request {i} has an empty prompt; a model needs at least one token to go on from")
        if len(request.token_ids) + sampling.max_tokens > max_model_len:
            raise RolloutError(
                f"request {i}: prompt of {len(request.token_ids)} tokens + {sampling.max_tokens} new ones pass the "
                f"engine's max_model_len {max_model_len}; raise rollout.max_model_len or lower data.max_response_length"
            )


def make_engine(settings: EngineSettings) -> RolloutEngine:
    """Build the engine that settings.name says."""
    if settings.name == "vllm":
        from megatron_rl.rollout.vllm_engine import VllmEngine

        return VllmEngine(settings)
    if settings.name == "hf":
        from megatron_rl.rollout.hf_engine import HfEngine

        return HfEngine(settings)
    if settings.name == "fake":
        from megatron_rl.rollout.fake import FakeEngine

        return FakeEngine(settings)
    raise RolloutError(f"rollout.name {settings.name!r} is not known; use vllm, hf or fake")
