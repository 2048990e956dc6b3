"""SFT data: rows of conversations, or of prompts and responses, as token ids with a loss mask.

A row holds data.messages_key (a list of chat messages; each assistant message is trained on), or
data.prompt_key (messages or a string) and data.response_key (a string; it alone is trained on).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.data import DataConfig
from megatron_rl.data.chat_text import is_chat_text
from megatron_rl.data.files import BadRow, Row, find_value, read_rows, refuse_bad_rows
from megatron_rl.data.prompts import Length, data_source, read_messages, read_prompt, refuse_empty, refuse_overlong
from megatron_rl.data.render import Renderer
from megatron_rl.data.tokenized import Rendered, render_rows


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

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Usable rows of each data source."""
        return dict(Counter(sample.data_source for sample in self.samples))


def load_sft(cfg: DataConfig, files: Sequence[str], renderer: Renderer, *, validation: bool = False) -> SftSet:
    """Read, check and render all rows of `files`. `validation` only says which key errors name.

    Rows longer than cfg.max_prompt_length + cfg.max_response_length are an error, left out, or cut at their
    end (cfg.overlong_prompts).

    Raises DataError: unreadable files, rows that cannot be used (all of them, by file and row), rows in which
    no token is trained on, overlong rows under the policy "error", no row left.
    """
    what = "data.val_files" if validation else "data.train_files"
    limit = cfg.max_prompt_length + cfg.max_response_length
    rows = read_rows(files, what)
    rendered, num_cached = render_rows(cfg, rows, renderer, render_sample)
    samples: list[SftSample] = []
    bad: list[tuple[Row, str]] = []
    overlong: list[Length] = []
    num_truncated = 0
    for index, (row, tokens) in enumerate(zip(rows, rendered, strict=True)):
        try:
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
        samples.append(SftSample(index, tuple(ids), tuple(mask), data_source(cfg, row)))
    refuse_bad_rows(bad, len(rows), what)
    if cfg.overlong_prompts == "error":
        refuse_overlong(overlong, len(rows), limit, "sequences", "data.max_prompt_length + data.max_response_length")
    refuse_empty(len(samples), len(rows), limit, what)
    return SftSet(
        samples=tuple(samples),
        num_rows=len(rows),
        num_filtered=len(rows) - len(samples),
        num_truncated=num_truncated,
        num_without_end=sum(not renderer.ends_with_eos(sample.token_ids, sample.loss_mask) for sample in samples),
        num_cached=num_cached,
    )


def render_sample(cfg: DataConfig, renderer: Renderer, values: dict[str, Any]) -> Rendered:
    """A row as tokens and loss mask. Raises BadRow where it cannot be rendered."""
    conversation, response = find_value(values, cfg.messages_key), find_value(values, cfg.response_key)
    if conversation is not None:
        messages = read_messages(conversation, cfg.messages_key, "messages")
        assert isinstance(messages, list)
        ids, mask = renderer.conversation_ids(messages)
        return Rendered(ids, loss_mask=mask)
    if find_value(values, cfg.prompt_key) is None and response is None:
        raise BadRow(
            f"there is neither {cfg.messages_key!r} nor {cfg.prompt_key!r} and {cfg.response_key!r} "
            "-- add them, or name the columns in data.messages_key or data.prompt_key and data.response_key"
        )
    prompt = read_prompt(cfg, values)
    if not isinstance(response, str):
        found = "not there" if response is None else f"a {type(response).__name__}"
        raise BadRow(f"{cfg.response_key!r} is {found} -- give a string, or name the column in data.response_key")
    if is_chat_text(response):
        raise BadRow(f"{cfg.response_key!r} is text that holds chat messages -- give the answer's text alone")
    ids, mask = renderer.sft_ids(prompt, response)
    return Rendered(ids, loss_mask=mask)


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
