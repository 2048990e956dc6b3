"""What a rollout engine can do, as data: whatever depends on the engine reads this record, and never its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Refusal = tuple[str, str]
"""(reason, cure)"""


@dataclass(frozen=True)
class Engine:
    """One rollout engine. A file of megatron_rl/engines holds one as `ENGINE`; the listing of the folder finds it."""

    name: str
    """The value of rollout.name that chooses it."""
    implementation: str
    """`module:Class` of the megatron_rl.rollout.engine.RolloutEngine. It is built from EngineSettings; an engine that
    shares weights gets the shared tensors as a second argument."""
    parameters: Literal["fused", "checkpoint", "own", "none"]
    """How it stores the model: fused and padded as vLLM does (models/engine.py), under the names of the checkpoint, in
    a way of its own (an update is then update_weights with whole tensors), or not at all. An engine without parameters
    makes tokens and log-probabilities up: it stands in for one in tests."""
    package: str | None = None
    """The Python package that it needs beside torch and transformers."""
    imports: tuple[str, ...] = ()
    """Modules that building it imports and that take seconds: a rank imports them before, as a phase of the start."""
    multi_rank: bool = False
    """One engine can span several ranks (rollout.tp)."""
    deals_experts: bool = False
    """The ranks of one engine can hold whole experts (rollout.ep)."""
    returns_experts: bool = False
    """It returns the experts that each token went to (actor.router_replay=rollout)."""
    cpu_lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys whose values other than the default it cannot do on CPUs, though it can on GPUs -> the reason."""
    shares_weights: bool = False
    """Its parameters can be the trainer's memory (rollout.share_weights)."""
    stop_texts: bool = True
    """It ends a response at a text (rollout.stop) that is no special token of the tokenizer."""
    settings: frozenset[str] = frozenset()
    """Keys of OPTIONAL_SETTINGS that have an effect on it."""
    refuse_keyword: Callable[[str], Refusal | None] | None = None
    """Why a keyword of rollout.engine_kwargs may not be given, or None if it may; None: it takes no keywords."""
    adapter_ranks: tuple[int, ...] = ()
    """Ranks of LoRA adapters that it has kernels for, ascending; it then holds one beside its weights
    (model.lora.sync=adapter). Empty: it holds none."""
    latent_dims: tuple[int, ...] | None = None
    """Numbers of a token's compressed keys and values with its position (kv_lora_rank + qk_rope_head_dim) for which it
    has kernels of latent attention; None: any."""
    cpu_latent_dims: tuple[int, ...] | None = None
    """The same on CPUs."""
    cpu_latent_ropes: tuple[str, ...] | None = None
    """Kinds of RoPE with which it computes latent attention right on CPUs; None: all."""
    head_dims: tuple[int, ...] | None = None
    """Attention head sizes that it has kernels for; None: all."""
    derives_head_dim: frozenset[str] = frozenset()
    """Architectures for which it takes hidden_size / num_attention_heads in place of config.json's head_dim."""

    @property
    def runs_model(self) -> bool:
        """Its log-probabilities are a model's, and can be compared with the trainer's."""
        return self.parameters != "none"

    @property
    def takes_adapters(self) -> bool:
        """It can hold a LoRA adapter beside its weights."""
        return bool(self.adapter_ranks)

    @property
    def takes_whole_tensors(self) -> bool:
        """Its updates are update_weights alone, whatever rollout.weight_sync says."""
        return self.parameters in ("own", "none")


PATH_FORM = "package.module:Class"
"""How an engine of the user's is named."""


def engine_by_path(path: str) -> Engine:
    """The record of an engine that is named by its class: nothing is supposed of what it can do."""
    return Engine(name=path, implementation=path, parameters="own", stop_texts=False)


OPTIONAL_SETTINGS = (
    "gpu_memory_utilization",
    "kv_cache_gb",
    "max_num_seqs",
    "max_num_batched_tokens",
    "decode",
    "enforce_eager",
    "free_cache_engine",
)
"""Keys of section `rollout` that only some engines have a use for."""
