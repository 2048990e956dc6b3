"""Llama: the table that most dense families share."""

from __future__ import annotations

from megatron_rl.models.fields import Fields
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Qkv, Rows, Whole, ffn, hidden, query_size, vocab
from megatron_rl.models.rope import KINDS
from megatron_rl.models.rules import Family, Rule, same_layers

ATTENTION = (
    Rule("input_layernorm.weight", Whole(hidden), ("input_layernorm.weight",)),
    Rule(
        "self_attention.linear_qkv.weight",
        Qkv(),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        engine="self_attn.qkv_proj.weight",
    ),
    Rule("self_attention.linear_proj.weight", Cols(hidden, query_size), ("self_attn.o_proj.weight",)),
)
MLP_NORM = Rule("pre_mlp_layernorm.weight", Whole(hidden), ("post_attention_layernorm.weight",))
MLP = (
    MLP_NORM,
    Rule(
        "mlp.linear_fc1.weight",
        Rows(ffn, hidden, count=2),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        engine="mlp.gate_up_proj.weight",
    ),
    Rule("mlp.linear_fc2.weight", Cols(hidden, ffn), ("mlp.down_proj.weight",)),
)
EMBEDDING = Rule("embedding.word_embeddings.weight", Rows(vocab, hidden), ("model.embed_tokens.weight",))
FINAL_NORM = Rule("decoder.final_layernorm.weight", Whole(hidden), ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", Rows(vocab, hidden), ("lm_head.weight",))

LLAMA = Family(
    "LlamaForCausalLM",
    Fields("llama", ropes=KINDS),
    layer=same_layers(*ATTENTION, *MLP),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    known={
        "llama3.1/8b": known("LlamaForCausalLM", 4096, 32, 32, 8, 14336, 128256),
        "llama3.1/70b": known("LlamaForCausalLM", 8192, 80, 64, 8, 28672, 128256),
    },
)
