"""SFT data: rows of conversations, or of prompts and responses, as token ids with a loss mask.

A row holds data.messages_key (a list of chat messages; each assistant message is trained on), or
data.prompt_key (messages or a string) and data.response_key (a string, which alone is trained on; or messages, of
which the assistant's are). ShareGPT's `conversations` and TRL's `completion` are read where those are not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_text import is_chat_text
from megatron_rl.data.columns import (
    TemplateInputs,
    messages_column,
    refuse_columns,
    response_column,
    template_inputs,
    unused_columns,
)
from megatron_rl.data.conversation import Message, normal_messages
from megatron_rl.data.files import BadRow, DataRow, find_value, read_rows, refuse_bad_rows
from megatron_rl.data.formats import Values
from megatron_rl.data.prompts import (
    Length,
    data_source,
    read_messages,
    read_prompt,
    refuse_empty,
    refuse_overlong,
    unused_notes,
    with_own_system,
)
from megatron_rl.data.render import Renderer
from megatron_rl.data.tokenized import Rendered, render_rows
from megatron_rl.errors import DataError


@dataclass(frozen=True)
class SftSample:
    """One row, rendered.

    Example: prompt "4+5=" and response "9" give token_ids=(22, 13, 23, 31, 27, 0), loss_mask=(False, False,
    False, False, True, True): the response and its end token.
    """

    index: int
    """Row number over all files of the data set, from 0."""
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """One entry a token: whether the model is trained to predict it."""
    data_source: str = ""
    where: str = field(default="", compare=False)
    """File and row, for messages: "train.jsonl row 7"."""


@dataclass(frozen=True)
class SftSet:
    """The usable rows of some files, in file order, and what became of the rest."""

    samples: tuple[SftSample, ...]
    num_rows: int
    """Rows read: len(samples) + num_filtered."""
    num_filtered: int
    """Rows left out because they are longer than data.max_prompt_length + data.max_response_length tokens."""
    num_truncated: int
    """Rows of which only the first data.max_prompt_length + data.max_response_length tokens are kept."""
    num_without_end: int
    """Samples whose last trained token is no end token, so that they do not teach when to stop: cut ones, and
    all of them under a template that writes no end token."""
    num_cached: int = 0
    """Rows whose tokens were read from data.cache_dir."""
    notes: tuple[str, ...] = ()
    """What a reader of the run's first lines should know of the rows, a line each."""

    @property
    def items(self) -> tuple[SftSample, ...]:
        """The samples: what a run's data set is made of, whatever its kind."""
        return self.samples

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Usable rows of each data source."""
        return dict(Counter(sample.data_source for sample in self.samples))


def load_sft(cfg: DataConfig, files: Sequence[str], renderer: Renderer, *, validation: bool = False) -> SftSet:
    """Read, check and render all rows of `files`. `validation` only says which key errors name.

    Rows longer than cfg.max_prompt_length + cfg.max_response_length are an error, left out, or cut at
    their end (cfg.overlong_prompts).

    Raises DataError: unreadable files, rows that cannot be used (all of them, by file and row), rows in which
    no token is trained on, overlong rows under the policy "error", no row left.
    """
    what = "data.val_files" if validation else "data.train_files"
    limit = cfg.max_prompt_length + cfg.max_response_length
    rows = read_rows(files, what)
    rendered, num_cached = render_rows(cfg, rows, renderer, render_sample)
    samples: list[SftSample] = []
    bad: list[tuple[DataRow, str]] = []
    overlong: list[Length] = []
    num_truncated = num_without_end = num_whole_without_end = 0
    unused: Counter[str] = Counter()
    for index, (row, tokens) in enumerate(zip(rows, rendered, strict=True)):
        try:
            refuse_columns(cfg, row.values, renderer.template_names)
            if tokens.fault is not None:
                raise BadRow(tokens.fault)
            ids, mask = tokens.token_ids, tokens.loss_mask
            num_tokens = len(ids)
            if num_tokens > limit:
                overlong.append(Length(row, num_tokens))
                if cfg.overlong_prompts != "truncate":
                    continue
                ids, mask = ids[:limit], mask[:limit]
                num_truncated += 1
            _check_trained(mask, num_tokens)
        except BadRow as fault:
            bad.append((row, str(fault)))
            continue
        unused.update(unused_columns(cfg, row.values, "sft"))
        ends = renderer.ends_with_eos(ids, mask)
        num_without_end += not ends
        num_whole_without_end += not ends and len(ids) == num_tokens
        samples.append(SftSample(index, tuple(ids), tuple(mask), data_source(cfg, row), row.where))
    refuse_bad_rows(bad, len(rows), what)
    if cfg.overlong_prompts == "error":
        refuse_overlong(overlong, len(rows), limit, "sequences", "data.max_prompt_length + data.max_response_length")
    refuse_empty(len(samples), len(rows), limit, what)
    if num_whole_without_end and num_without_end == len(samples):
        raise DataError(f"{what}: {no_end(renderer, len(samples))}")
    notes = unused_notes(unused, len(rows))
    if num_without_end:
        notes = (f"{num_without_end:,} of {len(samples):,} rows do not teach when to stop: {_WHY}", *notes)
    return SftSet(
        samples=tuple(samples),
        num_rows=len(rows),
        num_filtered=len(rows) - len(samples),
        num_truncated=num_truncated,
        num_without_end=num_without_end,
        num_cached=num_cached,
        notes=notes,
    )


def render_sample(cfg: DataConfig, renderer: Renderer, values: Values) -> Rendered:
    """A row as tokens and loss mask. Raises BadRow if it cannot be rendered."""
    column, answer = messages_column(cfg, values), response_column(cfg, values)
    conversation, response = find_value(values, column), find_value(values, answer)
    inputs = template_inputs(cfg, values)
    if conversation is not None:
        messages = read_messages(conversation, column, "messages", trained=True)
        assert isinstance(messages, list)
        ids, mask = renderer.conversation_ids(with_own_system(cfg, values, messages), inputs)
        return Rendered(ids, loss_mask=mask)
    if find_value(values, cfg.prompt_key) is None and response is None:
        raise BadRow(
            f"there is neither {cfg.messages_key!r} nor {cfg.prompt_key!r} and {cfg.response_key!r} "
            "-- add them, or name the columns in data.messages_key or data.prompt_key and data.response_key"
        )
    prompt = read_prompt(cfg, values)
    if isinstance(response, list):
        ids, mask = _with_messages(renderer, prompt, response, answer, inputs)
    elif isinstance(response, str):
        if is_chat_text(response):
            raise BadRow(f"{answer!r} is text that holds chat messages -- give the answer's text alone")
        ids, mask = renderer.sft_ids(prompt, response, inputs)
    else:
        found = "not there" if response is None else f"a {type(response).__name__}"
        raise BadRow(f"{answer!r} is {found} -- give a string, or name the column in data.response_key")
    return Rendered(ids, loss_mask=mask)


def no_end(renderer: Renderer, num_rows: int) -> str:
    """Why rows that teach no end token cannot be trained on, and what to do."""
    end = renderer.turn_end()
    if end is None:
        cure = "use a chat template that writes an end token after each answer, or data.chat_template=plain"
    else:
        cure = f"the chat template ends answers with {end}: set model.eos_token='{end}'"
    ends = ", ".join(repr(renderer.decode([token], skip_special_tokens=False)) for token in renderer.eos_token_ids)
    return (
        f"none of the {num_rows:,} rows ends with an end token ({ends or 'there is none'}), so the "
        f"model would not learn when to stop -- {cure}"
    )


_WHY = "their last trained token is no end token (cut rows, or the chat template)"


def _with_messages(
    renderer: Renderer, prompt: str | list[Message], response: list[object], column: str, inputs: TemplateInputs
) -> tuple[list[int], list[bool]]:
    """A response of messages after a prompt of messages."""
    if isinstance(prompt, str):
        raise BadRow(f"{column!r} is a list, and the prompt a string -- give messages in both, or strings in both")
    if prompt[-1:] and prompt[-1].get("role") == "assistant":
        raise BadRow("the prompt ends with an assistant message -- leave the answer out of the prompt")
    added = normal_messages(response, trained=True)
    return renderer.conversation_ids([*prompt, *added], inputs, num_context=len(prompt))


def _check_trained(mask: list[bool], num_tokens: int) -> None:
    # The first token of a sequence is predicted by nothing, so training on it alone is training on nothing.
    if any(mask[1:]):
        return
    if len(mask) < num_tokens:
        raise BadRow(
            f"the first {len(mask)} of its {num_tokens} tokens, which data.overlong_prompts=truncate keeps, "
            "hold no response -- raise data.max_prompt_length, or filter"
        )
    raise BadRow("no token is trained on -- give a response, or leave the row out")
