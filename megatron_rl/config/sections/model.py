"""Section `model`: which transformer, which tokenizer, in which precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rl.config.sections.base import UserPath, section
from megatron_rl.config.sections.lora import LoraConfig


@section
class ModelConfig:
    path: UserPath
    """Folder of the model in Hugging Face format: config.json and, with init=pretrained, safetensors."""
    tokenizer_path: UserPath | None = None
    """Folder with tokenizer.json; model.path if unset."""
    eos_token: str | None = None
    """Token that ends a response, in place of the tokenizer's end token (a base model's chat template may end its turns
    with another); the saved model's tokenizer and configs name it too."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained reads the weights from `path`; random draws them from trainer.seed, the same for every layout."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the trained parameters; with bfloat16 the optimizer keeps float32 master parameters."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
