"""Mistral: Llama's table with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_rl.models.families.llama import LLAMA
from megatron_rl.models.fields import Fields
from megatron_rl.models.known import known
from megatron_rl.models.rope import KINDS
from megatron_rl.models.windows import windows_everywhere

_NAME = "MistralForCausalLM"
MISTRAL = replace(
    LLAMA,
    architecture=_NAME,
    fields=Fields("mistral", ("num_key_value_heads",), windows=partial(windows_everywhere, default=4096), ropes=KINDS),
    known={
        "mistral/7b": known(_NAME, 4096, 32, 32, 8, 14336, 32768),
        "mistral/nemo-12b": known(_NAME, 5120, 40, 32, 8, 14336, 131072, head_dim=128),
    },
)
