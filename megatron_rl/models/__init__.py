"""What a model family is: its shape, its parameters and their layouts. No torch."""

from __future__ import annotations

from megatron_rl.models.llama import LLAMA
from megatron_rl.models.mixtral import MIXTRAL
from megatron_rl.models.qwen2 import QWEN2
from megatron_rl.models.qwen3 import QWEN3, QWEN3_MOE
from megatron_rl.models.rules import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "MixtralForCausalLM": MIXTRAL,
}
"""HF architecture -> its table."""
