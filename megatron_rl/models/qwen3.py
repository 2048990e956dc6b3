"""Qwen3 and Qwen3-MoE: Llama's table with a norm on each head's query and key, and experts in place of the MLP."""

from __future__ import annotations

from megatron_rl.models.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP, MLP_NORM, OUTPUT
from megatron_rl.models.rules import Family, Rule

QK_NORM = (
    Rule("self_attention.q_layernorm.weight", "whole", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", "whole", ("self_attn.k_norm.weight",)),
)
EXPERTS = (
    MLP_NORM,
    Rule("mlp.router.weight", "whole", ("mlp.gate.weight",)),
    Rule(
        "mlp.experts.local_experts.*.linear_fc1.weight",
        "gate_up",
        ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    ),
    Rule("mlp.experts.local_experts.*.linear_fc2.weight", "cols", ("mlp.experts.*.down_proj.weight",)),
)
QWEN3 = Family("qwen3", layer=(*ATTENTION, *QK_NORM, *MLP), embedding=EMBEDDING, final_norm=FINAL_NORM, output=OUTPUT)
QWEN3_MOE = Family(
    "qwen3_moe", layer=(*ATTENTION, *QK_NORM, *EXPERTS), embedding=EMBEDDING, final_norm=FINAL_NORM, output=OUTPUT
)
