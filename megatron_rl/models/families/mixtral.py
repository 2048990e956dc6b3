"""Mixtral: Llama's table with experts in place of the MLP. w1 is the gate, w3 the up and w2 the down projection."""

from __future__ import annotations

from functools import partial

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.fields import Fields
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Rows, Whole, experts, ffn, hidden
from megatron_rl.models.rope import Linear, Llama3, Rope
from megatron_rl.models.rules import Family, Rule, same_layers
from megatron_rl.models.windows import windows_everywhere

EXPERTS = (
    MLP_NORM,
    Rule("mlp.router.weight", Whole(experts, hidden), ("block_sparse_moe.gate.weight",), live="mlp.gate.weight"),
    Rule(
        "mlp.experts.linear_fc1.weight",
        Rows(ffn, hidden, count=2),
        ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
        engine="block_sparse_moe.experts.w13_weight",
        live="mlp.experts.gate_up_proj",
    ),
    Rule(
        "mlp.experts.linear_fc2.weight",
        Cols(hidden, ffn),
        ("block_sparse_moe.experts.*.w2.weight",),
        engine="block_sparse_moe.experts.w2_weight",
        live="mlp.experts.down_proj",
    ),
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    Fields(
        "mixtral",
        ("num_key_value_heads", "num_experts_per_tok"),
        experts=True,
        windows=partial(windows_everywhere, default=None),
        norm_topk_prob=True,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        # transformers fails on dynamic and YaRN where head_dim is not in the file, as in Mixtral's.
        ropes=(Rope, Linear, Llama3),
    ),
    layer=same_layers(*ATTENTION, *EXPERTS),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    known={"mixtral/8x7b": known("MixtralForCausalLM", 4096, 32, 32, 8, 14336, 32000, experts=(8, 2))},
)
