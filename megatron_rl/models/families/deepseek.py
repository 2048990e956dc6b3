"""DeepSeek-V3 (DeepSeek-AI 2024), for planning only: multi-head latent attention, a shared expert, and plain MLPs in
the first layers. Without its multi-token-prediction layer, which neither side needs for sampling.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models.families.llama import EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.families.qwen3 import ROUTED
from megatron_rl.models.fields import Fields
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Rows, Whole, dense_ffn, experts, hidden, shared_ffn
from megatron_rl.models.rules import Family, Rule
from megatron_rl.models.shape import Latent, ModelShape


def _latent(shape: ModelShape) -> Latent:
    assert shape.latent is not None, f"{shape.architecture} has latent attention"
    return shape.latent


def query_rank(shape: ModelShape) -> int:
    """Numbers of a token's compressed query."""
    return _latent(shape).q_rank


def query_rows(shape: ModelShape) -> int:
    """Numbers of all query heads."""
    return shape.num_heads * (_latent(shape).nope_dim + _latent(shape).rope_dim)


def kv_rank(shape: ModelShape) -> int:
    """Numbers of a token's compressed keys and values."""
    return _latent(shape).kv_rank


def kv_down_rows(shape: ModelShape) -> int:
    """Compressed keys and values, and the key that carries the position for all heads."""
    return _latent(shape).kv_rank + _latent(shape).rope_dim


def kv_rows(shape: ModelShape) -> int:
    """Numbers of all keys without position, and of all values."""
    return shape.num_heads * (_latent(shape).nope_dim + _latent(shape).value_dim)


def value_rows(shape: ModelShape) -> int:
    """Numbers of all values."""
    return shape.num_heads * _latent(shape).value_dim


ATTENTION = (
    Rule("input_layernorm.weight", Whole(hidden), ("input_layernorm.weight",)),
    Rule(
        "self_attention.linear_q_down_proj.weight",
        Whole(query_rank, hidden),
        ("self_attn.q_a_proj.weight",),
        engine="self_attn.fused_qkv_a_proj.weight",
    ),
    Rule("self_attention.q_layernorm.weight", Whole(query_rank), ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", Rows(query_rows, query_rank), ("self_attn.q_b_proj.weight",)),
    Rule(
        "self_attention.linear_kv_down_proj.weight",
        Whole(kv_down_rows, hidden),
        ("self_attn.kv_a_proj_with_mqa.weight",),
        engine="self_attn.fused_qkv_a_proj.weight",
    ),
    Rule("self_attention.kv_layernorm.weight", Whole(kv_rank), ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", Rows(kv_rows, kv_rank), ("self_attn.kv_b_proj.weight",)),
    Rule("self_attention.linear_proj.weight", Cols(hidden, value_rows), ("self_attn.o_proj.weight",)),
    MLP_NORM,
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
SHARED = (
    Rule("mlp.router.expert_bias", Whole(experts), ("mlp.gate.e_score_correction_bias",)),
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        Rows(shared_ffn, hidden, count=2),
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        engine="mlp.shared_experts.gate_up_proj.weight",
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", Cols(hidden, shared_ffn), ("mlp.shared_experts.down_proj.weight",)),
)


def layer(shape: ModelShape, number: int) -> tuple[Rule, ...]:
    """The first layers have a plain MLP, all others experts and a shared one."""
    return (*ATTENTION, *(DENSE if number < shape.dense_layers else (*ROUTED, *SHARED)))


_NAME = "DeepseekV3ForCausalLM"
DEEPSEEK_V3 = Family(
    _NAME,
    Fields("deepseek_v3", ffn_size="moe_intermediate_size", experts=True),
    layer=layer,
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    planned_only="multi-head latent attention and shared experts are not trained here",
    known={
        "deepseek-v3/671b": replace(
            known(_NAME, 7168, 61, 128, 128, 2048, 129280, head_dim=192, experts=(256, 8)),
            dense_layers=3,
            dense_ffn_size=18432,
            shared_ffn_size=2048,
            latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        )
    },
)
