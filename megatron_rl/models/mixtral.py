"""Mixtral: Llama's table with experts in place of the MLP. w1 is the gate, w3 the up and w2 the down projection."""

from __future__ import annotations

from megatron_rl.models.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.rules import Family, Rule

EXPERTS = (
    MLP_NORM,
    Rule("mlp.router.weight", "whole", ("block_sparse_moe.gate.weight",)),
    Rule(
        "mlp.experts.local_experts.*.linear_fc1.weight",
        "gate_up",
        ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
    ),
    Rule("mlp.experts.local_experts.*.linear_fc2.weight", "cols", ("block_sparse_moe.experts.*.w2.weight",)),
)
MIXTRAL = Family("mixtral", layer=(*ATTENTION, *EXPERTS), embedding=EMBEDDING, final_norm=FINAL_NORM, output=OUTPUT)
