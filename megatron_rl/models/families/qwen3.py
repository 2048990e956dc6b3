"""Qwen3 and Qwen3-MoE: Llama's table with a norm on each head's query and key, and experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP, MLP_NORM, OUTPUT
from megatron_rl.models.fields import Compute, Computed, Fields, is_count
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Rows, Whole, dense_ffn, experts, ffn, head_dim, hidden
from megatron_rl.models.rope import KINDS
from megatron_rl.models.rules import Family, Rule, same_layers
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.windows import switched_windows

QK_NORM = (
    Rule("self_attention.q_layernorm.weight", Whole(head_dim), ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", Whole(head_dim), ("self_attn.k_norm.weight",)),
)
ROUTED = (
    Rule("mlp.router.weight", Whole(experts, hidden), ("mlp.gate.weight",)),
    Rule(
        "mlp.experts.linear_fc1.weight",
        Rows(ffn, hidden, count=2),
        ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        engine="mlp.experts.w13_weight",
        live="mlp.experts.gate_up_proj",
    ),
    Rule(
        "mlp.experts.linear_fc2.weight",
        Cols(hidden, ffn),
        ("mlp.experts.*.down_proj.weight",),
        engine="mlp.experts.w2_weight",
        live="mlp.experts.down_proj",
    ),
)
DENSE = (
    Rule(
        "mlp.linear_fc1.weight",
        Rows(dense_ffn, hidden, count=2),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        engine="mlp.gate_up_proj.weight",
    ),
    Rule("mlp.linear_fc2.weight", Cols(hidden, dense_ffn), ("mlp.down_proj.weight",)),
)
"""The MLP of a layer without experts, in a family of which others have them"""


def plain_layers(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those of mlp_only_layers, and of each decoder_sparse_step all but the last one."""
    step, named = content.get("decoder_sparse_step") or 1, content.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(content["num_hidden_layers"]) if layer in named or (layer + 1) % step)


def mixed_sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelShape of families where some layers have no experts."""
    plain = plain_layers(content)
    return {"plain_layers": plain, "dense_ffn_size": content["intermediate_size"] if plain else 0}


def odd_layers(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What does not fit in a file of such a family; see Fields.odd."""
    if not is_count(content.get("num_hidden_layers")) or not all(
        computed(content.get(name)) for name, (computed, _) in MIXED.items()
    ):
        return
    plain = plain_layers(content)
    if len(plain) == content["num_hidden_layers"]:
        yield "mlp_only_layers", "leaves no layer with experts, together with decoder_sparse_step"
    if plain and not is_count(content.get("intermediate_size")):
        yield "intermediate_size", "must be a whole number above 0: some layers have no experts"


def _are_layers(value: object) -> bool:
    numbers = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [None]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in numbers)


MIXED: dict[str, tuple[Computed, str]] = {
    "mlp_only_layers": (_are_layers, "must be a list of layers' numbers"),
    "decoder_sparse_step": (lambda value: value is None or is_count(value), "must be a whole number above 0"),
}


def _moe_layer(shape: ModelShape, number: int) -> tuple[Rule, ...]:
    return (*ATTENTION, *QK_NORM, MLP_NORM, *(ROUTED if shape.has_experts(number) else DENSE))


_DENSE, _MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
QWEN3 = Family(
    _DENSE,
    Fields("qwen3", ("num_key_value_heads", "head_dim"), windows=switched_windows, ropes=KINDS),
    layer=same_layers(*ATTENTION, *QK_NORM, *MLP),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=Compute(qk_norm=True),
    known={
        "qwen3/0.6b": known(_DENSE, 1024, 28, 16, 8, 3072, 151936, head_dim=128, tied=True),
        "qwen3/1.7b": known(_DENSE, 2048, 28, 16, 8, 6144, 151936, head_dim=128, tied=True),
        "qwen3/4b": known(_DENSE, 2560, 36, 32, 8, 9728, 151936, head_dim=128, tied=True),
        "qwen3/8b": known(_DENSE, 4096, 36, 32, 8, 12288, 151936, head_dim=128),
        "qwen3/14b": known(_DENSE, 5120, 40, 40, 8, 17408, 151936, head_dim=128),
        "qwen3/32b": known(_DENSE, 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    },
)
QWEN3_MOE = Family(
    _MOE,
    Fields(
        "qwen3_moe",
        ("num_key_value_heads", "num_experts_per_tok"),
        ffn_size="moe_intermediate_size",
        experts=True,
        null_head_dim=False,
        windows=partial(switched_windows, by_layer=False),
        ropes=KINDS,
        values=MIXED,
        odd=odd_layers,
        sizes=mixed_sizes,
    ),
    layer=_moe_layer,
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=Compute(qk_norm=True),
    known={
        "qwen3/30b-a3b": known(_MOE, 2048, 48, 32, 4, 768, 151936, head_dim=128, experts=(128, 8)),
        "qwen3/235b-a22b": known(_MOE, 4096, 94, 64, 4, 1536, 151936, head_dim=128, experts=(128, 8)),
    },
)
