"""Section `data`: files, their keys, lengths and the batch of one step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from megatron_rl.config.base import OneOrMany, UserPath, section

FileList = Annotated[list[UserPath], OneOrMany]


@section
class DataConfig:
    train_files: FileList
    """Parquet or JSONL files of the training set; one path or a list."""
    val_files: FileList = Field(default_factory=list)
    """Parquet or JSONL files of the validation set; empty: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string."""
    response_key: str = "response"
    """Column of the response (SFT rows that hold prompt and response)."""
    messages_key: str = "messages"
    """Column of the conversation (SFT rows that hold chat messages)."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt, in tokens."""
    max_response_length: PositiveInt = 512
    """Longest response, in tokens: generation stops there; SFT rows may have max_prompt_length + this."""
    train_batch_size: PositiveInt = 64
    """Prompts of one RL step; sequences of one SFT step."""
    overlong_prompts: Literal["error", "filter", "truncate"] = "error"
    """What to do with rows that are too long; filtered and truncated rows are counted and shown."""
    shuffle: bool = True
    """Visit the training rows in a new random order each epoch (drawn from trainer.seed)."""
    chat_template: Literal["tokenizer", "plain"] = "tokenizer"
    """How messages become text: the tokenizer's chat template, or their contents with nothing between."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keywords for the tokenizer's chat template (for instance enable_thinking)."""
