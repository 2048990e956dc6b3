"""Weights in Hugging Face coordinates: one table per family, readers and writers of safetensors."""

from __future__ import annotations

from megatron_rl.weights.llama import LLAMA
from megatron_rl.weights.qwen2 import QWEN2
from megatron_rl.weights.spec import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
}
"""HF architecture -> its table."""
