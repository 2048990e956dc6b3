"""RL data: rows of prompts with what their reward needs, rendered and checked once, before work starts.

Keys of a row, in every kind of file (data.prompt_key and so on name others):
    prompt                     a list of chat messages, or a string
    reward_model.ground_truth  what the reward compares with; or the first of ground_truth, answer and label
    data_source                name of the set, for rewards and metrics; else the file's name without its ending
    extra_info                 a mapping that is handed to the reward; or metadata
So verl's schema (data_source, prompt, ability, reward_model, extra_info), slime's (prompt, label, metadata)
and plain rows (prompt, answer) are read as they are. columns.py says what of the other columns reaches the chat
template, which are refused, and which are listed as not used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatron_rl.config.checks.data_paths import stem_of
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_text import CURE, is_chat_text
from megatron_rl.data.columns import (
    GROUND_TRUTH_KEYS,
    info_keys,
    prompt_column,
    refuse_columns,
    template_inputs,
    truth_keys,
    unused_columns,
)
from megatron_rl.data.conversation import Message, normal_messages, with_system
from megatron_rl.data.files import NUM_SHOWN, BadRow, DataRow, find_value, read_rows, refuse_bad_rows
from megatron_rl.data.formats import Values
from megatron_rl.data.render import Renderer
from megatron_rl.data.tokenized import Rendered, render_rows
from megatron_rl.errors import DataError
from megatron_rl.messages import first_lines
from megatron_rl.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of some files, in file order, and counts of the rows that were left out or cut."""

    prompts: tuple[Prompt, ...]
    num_rows: int
    """Rows read: len(prompts) + num_filtered."""
    num_filtered: int
    """Rows left out because their prompt is longer than data.max_prompt_length."""
    num_truncated: int
    """Prompts of which only the last data.max_prompt_length tokens are kept."""
    num_cached: int = 0
    """Rows whose tokens were read from data.cache_dir."""
    notes: tuple[str, ...] = ()
    """What a reader of the run's first lines should know of the rows, a line each."""

    @property
    def items(self) -> tuple[Prompt, ...]:
        """The prompts: what a run's data set is made of, whatever its kind."""
        return self.prompts

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Usable rows of each data source."""
        return dict(Counter(prompt.data_source for prompt in self.prompts))


class Length(NamedTuple):
    """A row and its number of tokens."""

    row: DataRow
    num_tokens: int


def load_prompts(cfg: DataConfig, files: Sequence[str], renderer: Renderer, *, validation: bool = False) -> PromptSet:
    """Read, check and render all rows of `files`.

    `validation`: the rows are scored, so each needs a ground truth (in training a reward may do without one). Prompts
    longer than cfg.max_prompt_length are an error, left out, or cut to their last tokens (cfg.overlong_prompts).

    Raises DataError: unreadable files, rows that cannot be used (all of them, by file and row), overlong
    prompts under the policy "error", no row left.
    """
    what = "data.val_files" if validation else "data.train_files"
    # Only a run that reads its prompts from there has such files.
    what = "data.val_prompt_files" if cfg.val_prompt_files else what
    rows = read_rows(files, what)
    rendered, num_cached = render_rows(cfg, rows, renderer, render_prompt)
    prompts: list[Prompt] = []
    bad: list[tuple[DataRow, str]] = []
    overlong: list[Length] = []
    num_truncated = 0
    unused: Counter[str] = Counter()
    for index, (row, tokens) in enumerate(zip(rows, rendered, strict=True)):
        try:
            refuse_columns(cfg, row.values, renderer.template_names)
            prompt = _read_prompt(cfg, row, index, tokens, need_truth=validation)
        except BadRow as fault:
            bad.append((row, str(fault)))
            continue
        unused.update(unused_columns(cfg, row.values, "rl"))
        unused.update(
            f"{prompt_column(cfg, row.values)}[].{name}" for name in renderer.unread_fields(prompt.messages or ())
        )
        if len(prompt.token_ids) > cfg.max_prompt_length:
            overlong.append(Length(row, len(prompt.token_ids)))
            if cfg.overlong_prompts != "truncate":
                continue
            kept = prompt.token_ids[-cfg.max_prompt_length :]
            prompt = replace(prompt, token_ids=kept, text=renderer.decode(kept, skip_special_tokens=False))
            num_truncated += 1
        prompts.append(prompt)
    refuse_bad_rows(bad, len(rows), what)
    if cfg.overlong_prompts == "error":
        refuse_overlong(overlong, len(rows), cfg.max_prompt_length, "prompts", "data.max_prompt_length")
    refuse_empty(len(prompts), len(rows), cfg.max_prompt_length, what)
    notes = unused_notes(unused, len(rows), _TO_REWARDS) + turn_end_notes(
        renderer, any(prompt.messages for prompt in prompts)
    )
    return PromptSet(tuple(prompts), len(rows), len(rows) - len(prompts), num_truncated, num_cached, notes)


def render_prompt(cfg: DataConfig, renderer: Renderer, values: Values) -> Rendered:
    """A row's prompt as text and tokens. Raises BadRow if it cannot be rendered."""
    text = renderer.prompt_text(read_prompt(cfg, values), template_inputs(cfg, values))
    return Rendered(renderer.prompt_ids(text), text)


def refuse_overlong(overlong: Sequence[Length], num_rows: int, limit: int, noun: str, key: str) -> None:
    """Raise a DataError that counts overlong rows, shows the first and says what helps, if there are any."""
    if not overlong:
        return
    longest = max(length.num_tokens for length in overlong)
    head = (
        f"{len(overlong)} of {num_rows} rows hold {noun} of more than {key} = {limit} tokens "
        f"(the longest has {longest}) -- raise {key} to {longest}, or set data.overlong_prompts to filter or "
        "truncate:"
    )
    lines = first_lines((f"{length.row.where}: {length.num_tokens} tokens" for length in overlong), NUM_SHOWN)
    raise DataError("\n".join([head, *lines]))


def refuse_empty(num_kept: int, num_rows: int, limit: int, what: str) -> None:
    """Raise a DataError if the length filter left no row."""
    if num_kept == 0:
        raise DataError(
            f"{what}: none of the {num_rows} rows is within {limit} tokens, so the filter leaves nothing "
            "-- raise data.max_prompt_length, or set data.overlong_prompts=truncate"
        )


def read_messages(
    value: object, key: str, kind: Literal["prompt", "messages"], *, trained: bool = False
) -> str | list[Message]:
    """A row's prompt or conversation, if it is one. trained: whether its answers are trained on.

    Raises BadRow if it is something else.
    """
    if value is None:
        raise BadRow(f"there is no {key!r} -- add it, or name the column in data.{kind}_key")
    if isinstance(value, str) and is_chat_text(value):
        raise BadRow(f"{key!r} is text that holds chat messages -- {CURE}")
    if isinstance(value, str) and kind == "prompt":
        return value
    if not isinstance(value, list):
        allowed = "a list of messages or a string" if kind == "prompt" else "a list of messages"
        raise BadRow(f"{key!r} is a {type(value).__name__} -- give {allowed}")
    return normal_messages(value, trained=trained)


def read_prompt(cfg: DataConfig, values: Values) -> str | list[Message]:
    """A row's prompt: messages, the row's system message first; or a string, used as it is (data.string_prompt)."""
    column = prompt_column(cfg, values)
    prompt = read_messages(find_value(values, column), column, "prompt")
    if isinstance(prompt, str) and cfg.string_prompt == "user":
        prompt = [{"role": "user", "content": prompt}]
    return prompt if isinstance(prompt, str) else with_own_system(cfg, values, prompt)


def with_own_system(cfg: DataConfig, values: Values, messages: list[Message]) -> list[Message]:
    """The messages after the system message of the row's own column, if it has one."""
    inputs = template_inputs(cfg, values)
    return messages if inputs.system is None else with_system(messages, inputs.system, inputs.system_column)


_TO_REWARDS = " -- a reward is given extra_info (data.metadata_key)"


def unused_notes(unused: Counter[str], num_rows: int, hint: str = "") -> tuple[str, ...]:
    """A line that lists the columns that nothing reads, with their numbers of rows where not all have them."""
    if not unused:
        return ()
    parts = [name + (f" ({count:,} rows)" if count < num_rows else "") for name, count in sorted(unused.items())]
    return (f"columns that are not used: {', '.join(parts)}{hint}",)


def turn_end_notes(renderer: Renderer, has_messages: bool) -> tuple[str, ...]:
    """A line where the chat template ends answers with a token that ends no response."""
    end = renderer.turn_end() if has_messages else None
    if end is None or renderer.encode(end)[-1] in renderer.eos_token_ids:
        return ()
    return (
        f"the chat template ends answers with {end}, which ends no response here -- model.eos_token='{end}' makes "
        "it one",
    )


def data_source(cfg: DataConfig, row: DataRow) -> str:
    """The data source of a row: its data_source column, else its file's name without the extension."""
    return str(find_value(row.values, cfg.data_source_key) or stem_of(row.file))


def _read_prompt(cfg: DataConfig, row: DataRow, index: int, tokens: Rendered, *, need_truth: bool) -> Prompt:
    if tokens.fault is not None:
        raise BadRow(tokens.fault)
    truth = _ground_truth(cfg, row.values)
    if truth is None and cfg.label_key is not None:
        raise BadRow(f"there is no {cfg.label_key!r}, which data.label_key names")
    if truth is None and need_truth:
        keys = ", ".join(GROUND_TRUTH_KEYS)
        raise BadRow(f"there is no ground truth to score against -- add reward_model.ground_truth, or one of {keys}")
    prompt = read_prompt(cfg, row.values)
    tools = template_inputs(cfg, row.values).tools
    return Prompt(
        index=index,
        token_ids=tuple(tokens.token_ids),
        text=tokens.text,
        data_source=data_source(cfg, row),
        ground_truth=truth,
        extra_info=_extra_info(cfg, row.values),
        messages=None if isinstance(prompt, str) else tuple(prompt),
        tools=tuple(tools) if tools else None,
        has_source=bool(find_value(row.values, cfg.data_source_key)),
        where=row.where,
    )


def _ground_truth(cfg: DataConfig, values: Values) -> Any:
    key, truth = next(
        ((key, found) for key in truth_keys(cfg) if (found := find_value(values, key)) is not None), ("", None)
    )
    wrapped = values.get("reward_model")
    if cfg.label_key is None and isinstance(wrapped, str) and "ground_truth" in wrapped:
        raise BadRow("'reward_model' is text that holds a mapping -- write it as a mapping: json.loads it first")
    odd = next(_incomparable(truth), None)
    if odd is not None:
        raise BadRow(
            f"the ground truth {key!r} holds {odd!r}, which no response equals -- give text or a number (pandas writes "
            "a missing number as nan, a column of bytes is text without its encoding), or leave the row out"
        )
    return truth


def _incomparable(value: object) -> Iterator[float | bytes]:
    """Values that cannot be compared: non-finite numbers and bytes, at any depth."""
    if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
        yield value
    elif isinstance(value, dict):
        yield from (odd for part in value.values() for odd in _incomparable(part))
    elif isinstance(value, list):
        yield from (odd for part in value for odd in _incomparable(part))


def _extra_info(cfg: DataConfig, values: Values) -> Values:
    for key in info_keys(cfg):
        found = find_value(values, key)
        if found is not None:
            if not isinstance(found, dict):
                raise BadRow(f"{key!r} is a {type(found).__name__} -- give a mapping")
            return found
    return {}
