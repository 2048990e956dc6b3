"""Gemma 1 and the text models of Gemma 3 (Gemma Team 2024, 2025): zero-centered norms and scaled embeddings; Gemma 3
has norms behind attention and MLP too, and another RoPE in layers with a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP, OUTPUT
from megatron_rl.models.families.qwen3 import QK_NORM
from megatron_rl.models.fields import Compute, Computed, Fields, one_of
from megatron_rl.models.known import known
from megatron_rl.models.layer_types import local_and_global_rope
from megatron_rl.models.layouts import Whole, hidden
from megatron_rl.models.rope import Linear, Rope, is_finite_above_zero
from megatron_rl.models.rules import Family, Rule, same_layers
from megatron_rl.models.windows import windows_by_layer

_GELU = "gelu_pytorch_tanh"
_CAUSAL: dict[str, tuple[Computed, str]] = {
    "use_bidirectional_attention": (one_of(None, False), "only causal attention is computed")
}
_NOTES = frozenset({"cache_implementation"})
"""How transformers keeps keys and values while it generates"""


def _odd(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    size, heads = content.get("hidden_size"), content.get("num_attention_heads")
    if isinstance(size, int) and isinstance(heads, int) and heads > 0 and size % heads:
        yield "hidden_size", f"is not a multiple of num_attention_heads {heads}, which transformers refuses"


def _sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": float(content["query_pre_attn_scalar"])}


_GEMMA, _GEMMA3 = "GemmaForCausalLM", "Gemma3ForCausalLM"
_COMPUTE = Compute(zero_centered_norms=True, scaled_embeddings=True, activation=_GELU)
GEMMA = Family(
    _GEMMA,
    Fields(
        "gemma",
        ("num_key_value_heads", "head_dim"),
        tied=True,
        values={
            **_CAUSAL,
            # transformers and vLLM take "gelu" of older files for the tanh form.
            "hidden_act": (one_of(_GELU, "gelu"), f"only the gated MLP with {_GELU} is computed"),
            "hidden_activation": (one_of(None, _GELU), f"only the gated MLP with {_GELU} is computed"),
        },
        notes=_NOTES,
    ),
    layer=same_layers(*ATTENTION, *MLP),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=_COMPUTE,
    known={
        "gemma/2b": known(_GEMMA, 2048, 18, 8, 1, 16384, 256000, head_dim=256, tied=True),
        "gemma/7b": known(_GEMMA, 3072, 28, 16, 16, 24576, 256000, head_dim=256, tied=True),
    },
)
_, *_GATED = MLP
GEMMA3 = Family(
    _GEMMA3,
    Fields(
        "gemma3_text",
        ("num_key_value_heads", "head_dim"),
        windows=partial(windows_by_layer, pattern=6),
        by_layer_type=partial(local_and_global_rope, theta=1e6, local_theta=1e4),
        ropes=(Rope, Linear),
        tied=True,
        needed={"query_pre_attn_scalar": (is_finite_above_zero, "must be a number above 0")},
        values={**_CAUSAL, "hidden_activation": (one_of(_GELU), f"only the gated MLP with {_GELU} is computed")},
        notes=_NOTES | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        odd=_odd,
        sizes=_sizes,
    ),
    layer=same_layers(
        *ATTENTION,
        *QK_NORM,
        Rule("post_attention_layernorm.weight", Whole(hidden), ("post_attention_layernorm.weight",)),
        Rule("pre_mlp_layernorm.weight", Whole(hidden), ("pre_feedforward_layernorm.weight",)),
        *_GATED,
        Rule("post_mlp_layernorm.weight", Whole(hidden), ("post_feedforward_layernorm.weight",)),
    ),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=replace(_COMPUTE, qk_norm=True, output_norms=True),
    known={
        "gemma3/270m": known(_GEMMA3, 640, 18, 4, 1, 2048, 262144, head_dim=256, tied=True),
        "gemma3/1b": known(_GEMMA3, 1152, 26, 4, 1, 6912, 262144, head_dim=256, tied=True),
    },
)
