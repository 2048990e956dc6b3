"""Weights in Hugging Face coordinates: one table per family, readers and writers of safetensors."""

from __future__ import annotations

from megatron_rl.weights.llama import LLAMA
from megatron_rl.weights.mixtral import MIXTRAL
from megatron_rl.weights.qwen2 import QWEN2
from megatron_rl.weights.qwen3 import QWEN3, QWEN3_MOE
from megatron_rl.weights.spec import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "MixtralForCausalLM": MIXTRAL,
}
"""HF architecture -> its table."""
