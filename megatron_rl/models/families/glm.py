"""GLM-4.5 and GLM-4.5-Air (GLM-4.5 Team 2025): experts as DeepSeek-V3 has them, grouped-query attention, and RoPE over
half of each head. The weight of the router is float32 in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.families.deepseek import DENSE, GROUPS, ROUTED_ENTRIES, ROUTER_BIAS, SHARED, routed_sizes
from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.families.qwen2 import QKV_BIAS
from megatron_rl.models.families.qwen3 import QK_NORM, ROUTED
from megatron_rl.models.fields import Fields, one_of
from megatron_rl.models.known import known
from megatron_rl.models.rules import Family, Rule
from megatron_rl.models.shape import ModelShape, Router

_ROUTER, *_EXPERTS = ROUTED
EXPERTS = (replace(_ROUTER, float32=True), *_EXPERTS, ROUTER_BIAS, *SHARED)


def layer(shape: ModelShape, number: int) -> tuple[Rule, ...]:
    """Biases and norms of heads as the model has them; the first layers have a plain MLP."""
    attention = (*ATTENTION, *(QKV_BIAS,) * shape.attention_bias, *QK_NORM * shape.use_qk_norm)
    return (*attention, MLP_NORM, *(EXPERTS if shape.has_experts(number) else DENSE))


def _sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    routed = routed_sizes(content, "sigmoid", grouped=True, bias=True)
    return routed | {name: content.get(name, False) for name in ("attention_bias", "use_qk_norm")}


def _from_0(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_SWITCH = (one_of(True, False), "must be true or false")
_NAME = "Glm4MoeForCausalLM"
_GLM = replace(
    known(_NAME, 5120, 92, 96, 8, 1536, 151552, head_dim=128, experts=(160, 8)),
    dense_layers=3,
    dense_ffn_size=12288,
    shared_ffn_size=1536,
    router=Router("sigmoid", scale=2.5, bias=True),
    attention_bias=True,
    use_qk_norm=True,
)
GLM4_MOE = Family(
    _NAME,
    Fields(
        "glm4_moe",
        ("num_key_value_heads", "num_experts_per_tok", "intermediate_size", "head_dim"),
        ffn_size="moe_intermediate_size",
        experts=True,
        experts_entries=("n_routed_experts",),
        rotary_factor=0.5,
        rms_norm_eps=1e-5,
        needed={**ROUTED_ENTRIES, **GROUPS, "norm_topk_prob": _SWITCH},
        values={
            "attention_bias": _SWITCH,
            "use_qk_norm": _SWITCH,
            "num_nextn_predict_layers": (_from_0, "must be a whole number"),
            "scoring_func": (one_of(None, "sigmoid"), "experts are chosen by sigmoids here"),
        },
        notes=frozenset({"num_local_experts"}),
        sizes=_sizes,
    ),
    layer=layer,
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    known={
        "glm-4.5/355b": _GLM,
        "glm-4.5/air": replace(
            known(_NAME, 4096, 46, 96, 8, 1408, 151552, head_dim=128, experts=(128, 8)),
            dense_layers=1,
            dense_ffn_size=10944,
            shared_ffn_size=1408,
            router=Router("sigmoid", bias=True),
            attention_bias=True,
        ),
    },
)
