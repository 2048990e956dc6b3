"""Llama: the table that most dense families share."""

from __future__ import annotations

from megatron_rl.models.rules import Family, Rule

ATTENTION = (
    Rule("input_layernorm.weight", "whole", ("input_layernorm.weight",)),
    Rule(
        "self_attention.linear_qkv.weight",
        "qkv",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    Rule("self_attention.linear_proj.weight", "cols", ("self_attn.o_proj.weight",)),
)
MLP_NORM = Rule("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
MLP = (
    MLP_NORM,
    Rule("mlp.linear_fc1.weight", "gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Rule("mlp.linear_fc2.weight", "cols", ("mlp.down_proj.weight",)),
)
EMBEDDING = Rule("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",))
FINAL_NORM = Rule("decoder.final_layernorm.weight", "whole", ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", "vocab", ("lm_head.weight",))

LLAMA = Family("llama", layer=(*ATTENTION, *MLP), embedding=EMBEDDING, final_norm=FINAL_NORM, output=OUTPUT)
