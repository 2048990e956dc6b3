"""Qwen2 and Qwen2.5: Llama's table with a bias on queries, keys and values."""

from __future__ import annotations

from megatron_rl.models.families.llama import ATTENTION, EMBEDDING, FINAL_NORM, MLP, OUTPUT
from megatron_rl.models.fields import Compute, Fields
from megatron_rl.models.known import known
from megatron_rl.models.layouts import Qkv
from megatron_rl.models.rope import KINDS
from megatron_rl.models.rules import Family, Rule, same_layers
from megatron_rl.models.windows import switched_windows

QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    Qkv(cols=None),
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    engine="self_attn.qkv_proj.bias",
)
_NAME = "Qwen2ForCausalLM"
QWEN2 = Family(
    _NAME,
    Fields("qwen2", ("num_key_value_heads",), null_head_dim=False, windows=switched_windows, ropes=KINDS),
    layer=same_layers(*ATTENTION, QKV_BIAS, *MLP),
    embedding=EMBEDDING,
    final_norm=FINAL_NORM,
    output=OUTPUT,
    compute=Compute(qkv_bias=True),
    known={
        "qwen2.5/0.5b": known(_NAME, 896, 24, 14, 2, 4864, 151936, tied=True),
        "qwen2.5/1.5b": known(_NAME, 1536, 28, 12, 2, 8960, 151936, tied=True),
        "qwen2.5/3b": known(_NAME, 2048, 36, 16, 2, 11008, 151936, tied=True),
        "qwen2.5/7b": known(_NAME, 3584, 28, 28, 4, 18944, 152064),
        "qwen2.5/14b": known(_NAME, 5120, 48, 40, 8, 13824, 152064),
        "qwen2.5/32b": known(_NAME, 5120, 64, 40, 8, 27648, 152064),
        "qwen2.5/72b": known(_NAME, 8192, 80, 64, 8, 29568, 152064),
    },
)
