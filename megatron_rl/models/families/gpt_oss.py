"""gpt-oss (OpenAI 2025): experts with biases and a clamped gate, attention with sinks, windows in every other layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP_NORM, OUTPUT
from megatron_rl.models.families.qwen2 import QKV_BIAS
from megatron_rl.models.fields import ClampedGate, Compute, Fields, one_of, rope_entries
from megatron_rl.models.known import known
from megatron_rl.models.layouts import AddedOnce, Cols, Rows, Whole, experts, ffn, gate_up, heads, hidden, one
from megatron_rl.models.rope import EngineYarn
from megatron_rl.models.rules import Family, Rule, same_layers
from megatron_rl.models.windows import alternating_windows

# vLLM has its own names here.
_NORM, _QKV, _PROJ = ATTENTION
ATTENTION_WITH_SINKS = (
    _NORM,
    replace(_QKV, engine="attn.qkv_proj.weight"),
    replace(QKV_BIAS, engine="attn.qkv_proj.bias"),
    replace(_PROJ, engine="attn.o_proj.weight"),
    Rule("self_attention.linear_proj.bias", Whole(hidden), ("self_attn.o_proj.bias",), engine="attn.o_proj.bias"),
    Rule("self_attention.core_attention.softmax_offset", Rows(heads), ("self_attn.sinks",), engine="attn.sinks"),
)
# Rows of the gate and of the up projection are side by side, in the trainer and in vLLM as in files.
EXPERTS = (
    MLP_NORM,
    Rule("mlp.router.weight", Whole(experts, hidden), ("mlp.router.weight",)),
    Rule("mlp.router.bias", Whole(experts), ("mlp.router.bias",)),
    Rule(
        "mlp.experts.linear_fc1.weight",
        Rows(gate_up, hidden),
        ("mlp.experts.*.gate_up_proj",),
        engine="mlp.experts.w13_weight",
        live="mlp.experts.gate_up_proj",
    ),
    Rule(
        "mlp.experts.linear_fc1.bias",
        Cols(one, gate_up),
        ("mlp.experts.*.gate_up_proj_bias",),
        engine="mlp.experts.w13_bias",
        live="mlp.experts.gate_up_proj_bias",
    ),
    Rule(
        "mlp.experts.linear_fc2.weight",
        Cols(hidden, ffn),
        ("mlp.experts.*.down_proj",),
        engine="mlp.experts.w2_weight",
        live="mlp.experts.down_proj",
    ),
    Rule(
        "mlp.experts.linear_fc2.bias",
        AddedOnce(hidden),
        ("mlp.experts.*.down_proj_bias",),
        engine="mlp.experts.w2_bias",
        live="mlp.experts.down_proj_bias",
    ),
)


def _odd(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    other, used = content.get("experts_per_token"), content.get("num_experts_per_tok")
    if other is not None and other != used:
        yield "experts_per_token", f"differs from num_experts_per_tok {used}"
    for entry, value in rope_entries(content).items():
        rope = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        lacking = [name for name in ("beta_fast", "beta_slow") if "yarn" in rope.values() and name not in rope]
        if lacking:
            yield entry, f"has no {' and no '.join(lacking)}, and vLLM fails without"


_NAME = "GptOssForCausalLM"
GATE = ClampedGate(gain=1.702, limit=7.0)
GPT_OSS = Family(
    _NAME,
    Fields(
        "gpt_oss",
        ("num_key_value_heads", "num_experts_per_tok", "head_dim"),
        experts=True,
        norm_topk_prob=True,
        windows=alternating_windows,
        rope_theta=150000.0,
        rms_norm_eps=1e-5,
        ropes=(EngineYarn,),
        values={
            "tie_word_embeddings": (one_of(False), "vLLM has an output matrix of its own in this family"),
            "rms_norm_eps": (one_of(1e-5), "vLLM computes this family with 1e-05, whatever the entry says"),
            "attention_bias": (one_of(True), "vLLM computes attention with biases, whatever the entry says"),
            "swiglu_alpha": (one_of(GATE.gain), f"vLLM computes the gate with {GATE.gain}, whatever the entry says"),
            "swiglu_limit": (one_of(GATE.limit), f"vLLM computes the gate with {GATE.limit}, whatever the entry says"),
        },
        notes=frozenset({"experts_per_token", "initial_context_length"}),
        odd=_odd,
        experts_entries=("num_local_experts",),
    ),
    layer=same_layers(*ATTENTION_WITH_SINKS, *EXPERTS),
    embedding=replace(EMBEDDING, engine="model.embedding.weight"),
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=Compute(qkv_bias=True, linear_bias=True, sinks=True, clamped_gate=GATE),
    known={
        f"gpt-oss-{size}": replace(
            known(_NAME, 2880, layers, 64, 8, 2880, 201088, head_dim=64, experts=(count, 4)),
            windows=(128, 0) * (layers // 2),
        )
        for size, layers, count in (("20b", 24, 32), ("120b", 36, 128))
    },
)
