"""Section `model`: which transformer, which tokenizer, in which precision."""

from __future__ import annotations

from typing import Literal

from megatron_rl.config.base import UserPath, section


@section
class ModelConfig:
    path: UserPath
    """Folder with a Hugging Face config.json (and, with init=pretrained, safetensors)."""
    tokenizer_path: UserPath | None = None
    """Folder with tokenizer.json; the model's folder when not given."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained reads the weights in `path`; random draws them from trainer.seed, equal for every layout."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the trained weights; bfloat16 keeps float32 masters in the optimizer."""
