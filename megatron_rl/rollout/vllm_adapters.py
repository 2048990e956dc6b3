"""An adapter (LoRA) into a vLLM engine, in the place of the one before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import RolloutError
from megatron_rl.models.lora import Adapters
from megatron_rl.weights.peft_files import write_adapter_files

_NUMBER, _NAME = 1, "trained"
_MEMORY = "/dev/shm"


def load_adapter(engine: Any, tensors: Mapping[str, torch.Tensor], adapters: Adapters) -> Any:
    """Have vLLM's LLMEngine compute with these adapters; what a request must name for that. RolloutError if vLLM does
    not take them.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="adapter-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as folder:
        write_adapter_files(Path(folder), tensors.items(), adapters, "")
        request = LoRARequest(_NAME, _NUMBER, folder)
        # One that is held already would not be read again.
        engine.remove_lora(_NUMBER)
        if not engine.add_lora(request):
            raise RolloutError("vLLM did not take the adapter")
    return request
