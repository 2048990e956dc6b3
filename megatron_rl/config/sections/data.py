"""Section `data`: files, their keys, lengths and the batch of one step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import OneOrMany, UserPath, section

FileList = Annotated[list[UserPath], OneOrMany]

_NOT_OURS = "leave it out: the run decides it"
RESERVED_KEYWORDS = {
    "messages": "give the messages in their own column",
    "conversation": "give the messages in their own column",
    "tools": "give the tools in a column of their own, which data.tools_key names",
    "chat_template": "put the template into the tokenizer's folder (chat_template.jinja)",
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
         "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        _NOT_OURS,
    ),
}  # fmt: skip
"""Keywords of apply_chat_template that neither the config nor a row can give -> what to do."""


@section
class DataConfig:
    train_files: FileList = Field(default_factory=list)
    """Files of the training set: .parquet, .arrow, .jsonl, .json, .csv (the last three also as .gz), folders of
    datasets.save_to_disk, or patterns (data/*.parquet); one path or a list. eval and export do not read them."""
    mix_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """data_source: weight. Each source's share of the training items is its weight over their sum; empty: every
    row once an epoch."""
    val_files: FileList = Field(default_factory=list)
    """Files of the validation set, of the same kinds; empty: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string. As in all names of columns, dots lead
    into mappings (extra_info.question)."""
    string_prompt: Literal["verbatim", "user"] = "verbatim"
    """What a prompt that is a string is: the text that the model is given, or a user message for the template."""
    label_key: str | None = None
    """Column of the ground truth (dots lead into mappings: reward_model.ground_truth). When not given: that one,
    else ground_truth, answer or label."""
    metadata_key: str | None = None
    """Column of the mapping that the reward gets as extra_info; when not given: extra_info, else metadata."""
    data_source_key: str = "data_source"
    """Column of the row's data source, for rewards, mixing and metrics (metadata.source_name, say); rows without
    it belong to a source named like their file."""
    response_key: str = "response"
    """Column of the response (SFT rows that hold prompt and response)."""
    messages_key: str = "messages"
    """Column of the conversation (SFT rows that hold chat messages)."""
    tools_key: str = "tools"
    """Column of the tools that the chat template is given: a list of mappings, or JSON text; else metadata.tools."""
    enable_thinking_key: str = "enable_thinking"
    """Column of the template's keyword enable_thinking; further keywords stand in the column chat_template_kwargs."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt, in tokens."""
    max_response_length: PositiveInt = 512
    """Longest response, in tokens: generation stops there; SFT rows may have max_prompt_length + this."""
    train_batch_size: PositiveInt = 64
    """Prompts of one RL step; sequences of one SFT step."""
    val_batch_size: PositiveInt | None = None
    """Validation rows that are sampled and scored at once, to bound memory; all (SFT: train_batch_size) when not
    given. The metrics do not depend on it."""
    overlong_prompts: Literal["error", "filter", "truncate"] = "error"
    """What to do with rows that are too long; filtered and truncated rows are counted and shown."""
    shuffle: bool = True
    """Visit the training rows in a new random order each epoch (drawn from trainer.seed)."""
    chat_template: Literal["tokenizer", "plain"] = "tokenizer"
    """How messages become text: the tokenizer's chat template, or their contents with nothing between."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keywords for the tokenizer's chat template (for instance enable_thinking); a row's own come first."""
    num_workers: PositiveInt = 1
    """Processes that render and tokenize the rows; 1 does it in the controller."""
    cache_dir: UserPath | None = None
    """Folder that keeps tokenized rows for later runs; used again only where rows, tokenizer, template and code are
    the same. None keeps nothing."""
