"""Section `model`: which transformer, which tokenizer, in which precision."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_rl.config.sections.base import UserPath, section
from megatron_rl.config.sections.lora import LoraConfig


@section
class ModelConfig:
    path: UserPath
    """Folder of the model in Hugging Face format: config.json and, with init=pretrained, safetensors."""
    tokenizer_path: UserPath | None = None
    """Folder with the tokenizer (tokenizer.json, tokenizer.model, *.tiktoken or tekken.json); model.path if unset."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's: the path of a .jinja or .json file, the text, or the name of one of
    the tokenizer's templates. It is written into every saved model."""
    eos_token: str | None = None
    """Token that ends a response, in place of the tokenizer's end token (a base model's chat template may end its turns
    with another); the saved model's tokenizer and configs name it too."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained reads the weights from `path`; random draws them from trainer.seed, the same for every layout."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Entries laid over config.json before it is read (max_position_embeddings, rope_parameters, ...): trained, given
    to the engine, and written into saved models. They hold for the reference, and for a critic that starts from `path`.
    """
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the trained parameters; with bfloat16 the optimizer keeps float32 master parameters."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
