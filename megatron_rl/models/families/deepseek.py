"""DeepSeek-V2, DeepSeek-V3 and R1, Moonlight (DeepSeek-AI 2024): multi-head latent attention, experts beside a shared
MLP, and plain MLPs in the first layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from megatron_rl.models.families.llama import EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.families.qwen3 import DENSE, ROUTED
from megatron_rl.models.fields import Computed, Fields, is_count, one_of
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Cols, Rows, Whole, experts, hidden, shared_ffn
from megatron_rl.models.rope import LatentYarn, Rope, is_finite_above_zero
from megatron_rl.models.rules import Family, Rule
from megatron_rl.models.shape import Latent, ModelShape, Router


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


NORM = Rule("input_layernorm.weight", Whole(hidden), ("input_layernorm.weight",))
QUERIES = (Rule("self_attention.linear_q_proj.weight", Rows(query_rows, hidden), ("self_attn.q_proj.weight",)),)
KV_DOWN = Rule(
    "self_attention.linear_kv_down_proj.weight", Whole(kv_down_rows, hidden), ("self_attn.kv_a_proj_with_mqa.weight",)
)
FUSED_DOWN = "self_attn.fused_qkv_a_proj.weight"
COMPRESSED_QUERIES = (
    Rule(
        "self_attention.linear_q_down_proj.weight",
        Whole(query_rank, hidden),
        ("self_attn.q_a_proj.weight",),
        engine=FUSED_DOWN,
    ),
    Rule("self_attention.q_layernorm.weight", Whole(query_rank), ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", Rows(query_rows, query_rank), ("self_attn.q_b_proj.weight",)),
)
KEYS_VALUES = (
    Rule("self_attention.kv_layernorm.weight", Whole(kv_rank), ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", Rows(kv_rows, kv_rank), ("self_attn.kv_b_proj.weight",)),
    Rule("self_attention.linear_proj.weight", Cols(hidden, value_rows), ("self_attn.o_proj.weight",)),
)
ROUTER_BIAS = Rule("mlp.router.expert_bias", Whole(experts), ("mlp.gate.e_score_correction_bias",), constant=True)
SHARED = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        Rows(shared_ffn, hidden, count=2),
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        engine="mlp.shared_experts.gate_up_proj.weight",
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", Cols(hidden, shared_ffn), ("mlp.shared_experts.down_proj.weight",)),
)


def attention(shape: ModelShape) -> tuple[Rule, ...]:
    """Small models do not compress their queries; where they are, vLLM has both down projections in one."""
    if not _latent(shape).q_rank:
        return (NORM, *QUERIES, KV_DOWN, *KEYS_VALUES, MLP_NORM)
    down, *rest = COMPRESSED_QUERIES
    return (NORM, down, *rest, replace(KV_DOWN, engine=FUSED_DOWN), *KEYS_VALUES, MLP_NORM)


def mlp(shape: ModelShape, number: int) -> tuple[Rule, ...]:
    """The first layers have a plain MLP, all others experts and a shared one."""
    if not shape.has_experts(number):
        return DENSE
    return (*ROUTED, *((ROUTER_BIAS,) if shape.router.bias else ()), *SHARED)


def layer(shape: ModelShape, number: int) -> tuple[Rule, ...]:
    """Latent attention and the layer's MLPs."""
    return (*attention(shape), *mlp(shape, number))


def routed_sizes(
    content: Mapping[str, Any], score: Literal["softmax", "sigmoid"], *, grouped: bool, bias: bool
) -> dict[str, Any]:
    """Fields of ModelShape that say what layers have experts, and how a token's are chosen."""
    return {
        "dense_layers": min(content["first_k_dense_replace"], content["num_hidden_layers"]),
        "dense_ffn_size": content["intermediate_size"] if content["first_k_dense_replace"] else 0,
        "shared_ffn_size": content["moe_intermediate_size"] * content["n_shared_experts"],
        "further_layers": content.get("num_nextn_predict_layers", 0),
        "router": Router(
            score,
            scale=float(content["routed_scaling_factor"]),
            groups=content["n_group"] if grouped else 1,
            groups_per_token=content["topk_group"] if grouped else 1,
            bias=bias,
        ),
    }


def latent_sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelShape that latent attention has other values of."""
    latent = Latent(
        q_rank=content["q_lora_rank"] or 0,
        kv_rank=content["kv_lora_rank"],
        nope_dim=content["qk_nope_head_dim"],
        rope_dim=content["qk_rope_head_dim"],
        value_dim=content["v_head_dim"],
    )
    heads = content["num_attention_heads"]
    return {
        "latent": latent,
        "num_kv_heads": heads,
        "head_dim": latent.nope_dim + latent.rope_dim,
    }


def _v2_sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    grouped = content["topk_method"] == "group_limited_greedy"
    return latent_sizes(content) | routed_sizes(content, "softmax", grouped=grouped, bias=False)


def _v3_sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    return latent_sizes(content) | routed_sizes(content, "sigmoid", grouped=True, bias=True)


def _odd(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    heads, kv_heads = content.get("num_attention_heads"), content.get("num_key_value_heads")
    if kv_heads != heads:
        yield "num_key_value_heads", f"differs from num_attention_heads {heads}: every head has its own keys here"
    greedy = content.get("topk_method") == "greedy" and content.get("scoring_func") == "softmax"
    if greedy and content.get("n_group") != 1:
        yield "n_group", "must be 1 with topk_method greedy: vLLM would choose groups, and transformers would not"


def _from_0(value: object) -> bool:
    return is_count(value) or (value == 0 and not isinstance(value, bool))


def _null_or_count(value: object) -> bool:
    return value is None or is_count(value)


_COUNT = "must be a whole number above 0"
ROUTED_ENTRIES: dict[str, tuple[Computed, str]] = {
    "first_k_dense_replace": (_from_0, "must be a whole number"),
    "n_shared_experts": (is_count, _COUNT),
    "routed_scaling_factor": (is_finite_above_zero, "must be a number above 0"),
}
LATENT_ENTRIES: dict[str, tuple[Computed, str]] = {
    "q_lora_rank": (_null_or_count, "must be a whole number above 0, or null"),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (is_count, _COUNT)),
}
GROUPS: dict[str, tuple[Computed, str]] = dict.fromkeys(("n_group", "topk_group"), (is_count, _COUNT))
_VALUES: dict[str, tuple[Computed, str]] = {
    "moe_layer_freq": (one_of(None, 1), "layers without experts among layers with experts are not supported"),
    "rope_interleave": (one_of(None, True), "vLLM turns neighbours in this family, whatever the entry says"),
    "num_nextn_predict_layers": (_from_0, "must be a whole number"),
    "ep_size": (one_of(None, 1), "weights that are dealt to ranks are not supported"),
}
_NOTES = frozenset({"aux_loss_alpha", "seq_aux", "qk_head_dim", "num_experts", "num_local_experts"})
_COMMON: dict[str, Any] = {
    "ffn_size": "moe_intermediate_size",
    "experts": True,
    "experts_entries": ("n_routed_experts",),
    "ropes": (Rope, LatentYarn),
    "notes": _NOTES,
    "odd": _odd,
}
_SIZES = ("num_key_value_heads", "num_experts_per_tok", "intermediate_size")
_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
DEEPSEEK_V2 = Family(
    _V2,
    Fields(
        "deepseek_v2",
        _SIZES,
        needed={
            **ROUTED_ENTRIES,
            **LATENT_ENTRIES,
            "norm_topk_prob": (one_of(False), "transformers does not scale the weights of a token's experts here"),
            "topk_method": (
                one_of("greedy", "group_limited_greedy"),
                "experts are chosen by greedy or group_limited_greedy here",
            ),
            "scoring_func": (one_of("softmax"), "experts are chosen by a softmax here"),
            **GROUPS,
        },
        values=_VALUES,
        sizes=_v2_sizes,
        **_COMMON,
    ),
    layer=layer,
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    known={
        "deepseek-v2-lite": replace(
            known(_V2, 2048, 27, 16, 16, 1408, 102400, head_dim=192, experts=(64, 6)),
            norm_topk_prob=False,
            dense_layers=1,
            dense_ffn_size=10944,
            shared_ffn_size=2816,
            latent=Latent(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        )
    },
)
DEEPSEEK_V3 = Family(
    _V3,
    Fields(
        "deepseek_v3",
        _SIZES,
        needed={
            **ROUTED_ENTRIES,
            **LATENT_ENTRIES,
            **GROUPS,
            "norm_topk_prob": (one_of(True, False), "must be true or false"),
            "topk_method": (one_of("noaux_tc"), "experts are chosen with a bias (noaux_tc) here"),
            "scoring_func": (one_of("sigmoid"), "experts are chosen by sigmoids here"),
        },
        values=_VALUES,
        sizes=_v3_sizes,
        **_COMMON,
    ),
    layer=layer,
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    known={
        "deepseek-v3/671b": replace(
            known(_V3, 7168, 61, 128, 128, 2048, 129280, head_dim=192, experts=(256, 8)),
            dense_layers=3,
            dense_ffn_size=18432,
            shared_ffn_size=2048,
            latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
            router=Router("sigmoid", scale=2.5, groups=8, groups_per_token=4, bias=True),
        ),
        "moonlight-16b-a3b": replace(
            known(_V3, 2048, 27, 16, 16, 1408, 163840, head_dim=192, experts=(64, 6)),
            dense_layers=1,
            dense_ffn_size=11264,
            shared_ffn_size=2816,
            latent=Latent(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
            router=Router("sigmoid", scale=2.446, bias=True),
        ),
    },
)
