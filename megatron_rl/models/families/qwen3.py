"""Qwen3 and Qwen3-MoE: Llama's table with a norm on each head's query and key, and experts in place of the MLP."""

from __future__ import annotations

from functools import partial

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP, MLP_NORM, OUTPUT
from megatron_rl.models.fields import Compute, Fields
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Rows, Whole, experts, ffn, head_dim, hidden
from megatron_rl.models.rope import KINDS
from megatron_rl.models.rules import Family, Rule, same_layers
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
    ),
    layer=same_layers(*ATTENTION, *QK_NORM, MLP_NORM, *ROUTED),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=Compute(qk_norm=True),
    known={
        "qwen3/30b-a3b": known(_MOE, 2048, 48, 32, 4, 768, 151936, head_dim=128, experts=(128, 8)),
        "qwen3/235b-a22b": known(_MOE, 4096, 94, 64, 4, 1536, 151936, head_dim=128, experts=(128, 8)),
    },
)
