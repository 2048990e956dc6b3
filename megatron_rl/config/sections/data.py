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
    """Sampling weights of the data sources, {data_source: weight}: each source's fraction of the training rows is its
    weight over their sum. Empty: every row once per epoch."""
    val_files: FileList = Field(default_factory=list)
    """Files of the validation set, of the same kinds; no validation if empty."""
    val_prompt_files: FileList = Field(default_factory=list)
    """Files of prompts with a ground truth, which SFT samples at each validation and scores: with the engine
    and the reward of the sections rollout and reward. No engine if empty."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string. In all column names, dots address
    nested fields (extra_info.question)."""
    string_prompt: Literal["verbatim", "user"] = "verbatim"
    """How to read a prompt that is a string: as the text given to the model, or as a user message for the template."""
    label_key: str | None = None
    """Column of the ground truth; if unset, the first of reward_model.ground_truth, ground_truth, answer and label.
    KTO's rows: column of the label, true or false; if unset, label. A reward model's regression: column of the number;
    if unset, score."""
    metadata_key: str | None = None
    """Column of the mapping passed to the reward as extra_info; if unset, extra_info, else metadata."""
    data_source_key: str = "data_source"
    """Column of the row's data source, for rewards, mixing and metrics (for instance metadata.source_name); rows
    without it belong to a source named after their file."""
    response_key: str = "response"
    """Column of the response (SFT rows with prompt and response)."""
    chosen_key: str = "chosen"
    """Column of the better answer (rows of preferences): text, or messages; with the prompt before it if the row has
    none of its own."""
    rejected_key: str = "rejected"
    """Column of the worse answer, in the same form."""
    margin_key: str = "margin"
    """Column of a pair's margin (reward models): the number by which the better answer's score shall be higher; rows
    without it have 0."""
    messages_key: str = "messages"
    """Column of the conversation (SFT rows with chat messages)."""
    tools_key: str = "tools"
    """Column of the tools passed to the chat template: a list of mappings, or JSON text; else metadata.tools."""
    enable_thinking_key: str = "enable_thinking"
    """Column of the template's keyword enable_thinking; further keywords come from the column chat_template_kwargs."""
    max_prompt_length: PositiveInt = 512
    """Maximum prompt length, in tokens."""
    max_response_length: PositiveInt = 512
    """Maximum response length, in tokens, at which generation stops; SFT rows may have max_prompt_length + this."""
    train_batch_size: PositiveInt = 64
    """Prompts per RL step; sequences per SFT step; rows per step on preferences."""
    val_batch_size: PositiveInt | None = None
    """Validation rows that are sampled and scored at once, to bound memory; if unset, all (SFT: train_batch_size).
    The metrics do not depend on it."""
    overlong_prompts: Literal["error", "filter", "truncate"] = "error"
    """What to do with rows that are too long; filtered and truncated rows are counted."""
    shuffle: bool = True
    """Shuffle the training rows in each epoch (seed: trainer.seed)."""
    chat_template: Literal["tokenizer", "plain"] = "tokenizer"
    """How messages become text: by the tokenizer's chat template, or as their concatenated contents."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keywords for the chat template (for instance enable_thinking); those of a row take precedence."""
    num_workers: PositiveInt = 1
    """Processes that render and tokenize the rows; 1 uses the controller itself."""
    cache_dir: UserPath | None = None
    """Folder for a cache of tokenized rows; reused only if rows, tokenizer, template and code are the
    same. No cache if unset."""
