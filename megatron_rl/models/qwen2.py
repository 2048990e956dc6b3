"""Qwen2 and Qwen2.5: Llama's table with a bias on queries, keys and values."""

from __future__ import annotations

from megatron_rl.models.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP, OUTPUT
from megatron_rl.models.rules import Family, Rule

QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    "qkv",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
)
QWEN2 = Family("qwen2", layer=(*ATTENTION, QKV_BIAS, *MLP), embedding=EMBEDDING, final_norm=FINAL_NORM, output=OUTPUT)
