"""Qwen2-MoE and Qwen1.5-MoE: experts beside a shared MLP that a sigmoid weights, and Qwen2's biases in attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.families.qwen2 import QKV_BIAS
from megatron_rl.models.families.qwen3 import DENSE, MIXED, ROUTED, mixed_sizes, odd_layers
from megatron_rl.models.fields import Compute, Fields, is_count
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Rows, Whole, hidden, one, shared_ffn
from megatron_rl.models.rope import KINDS
from megatron_rl.models.rules import Family, Rule
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.windows import windows_off

SHARED = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        Rows(shared_ffn, hidden, count=2),
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        engine="mlp.shared_expert.gate_up_proj.weight",
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", Cols(hidden, shared_ffn), ("mlp.shared_expert.down_proj.weight",)),
    Rule("mlp.shared_experts.gate_weight", Whole(one, hidden), ("mlp.shared_expert_gate.weight",)),
)


def _layer(shape: ModelShape, number: int) -> tuple[Rule, ...]:
    return (*ATTENTION, QKV_BIAS, MLP_NORM, *((*ROUTED, *SHARED) if shape.has_experts(number) else DENSE))


def _sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    return mixed_sizes(content) | {"shared_ffn_size": content["shared_expert_intermediate_size"]}


_NAME = "Qwen2MoeForCausalLM"
QWEN2_MOE = Family(
    _NAME,
    Fields(
        "qwen2_moe",
        ("num_key_value_heads", "num_experts_per_tok"),
        ffn_size="moe_intermediate_size",
        experts=True,
        null_head_dim=False,
        windows=windows_off,
        ropes=KINDS,
        values=MIXED,
        needed={"shared_expert_intermediate_size": (is_count, "must be a whole number above 0")},
        odd=odd_layers,
        sizes=_sizes,
    ),
    layer=_layer,
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=Compute(qkv_bias=True, shared_gate=True),
    known={
        "qwen1.5-moe-a2.7b": replace(
            known(_NAME, 2048, 24, 16, 16, 1408, 151936, experts=(60, 4)), norm_topk_prob=False, shared_ffn_size=5632
        ),
        "qwen2/57b-a14b": replace(
            known(_NAME, 3584, 28, 28, 4, 2560, 151936, experts=(64, 8)), norm_topk_prob=False, shared_ffn_size=20480
        ),
    },
)
