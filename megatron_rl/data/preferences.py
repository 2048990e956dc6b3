"""Rows that were judged, as token ids: pairs of a better and a worse answer, and single answers with a label.

Layouts (TRL's; verl's data sets of pairs have the first):
    pairs      prompt, chosen, rejected: strings, or lists of messages, the answers being the last ones
               chosen, rejected without a prompt of messages: the prompt is what the two have in common at the start
    labelled   a row of supervised fine-tuning (data/sft.py), and a label: true for a good answer, false for a bad one.
               Pairs are read too, each as a good and a bad answer
    scored     a row of supervised fine-tuning, and a number
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, cast

from megatron_rl.algos.preference.base import RowKind
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_text import is_chat_text
from megatron_rl.data.columns import refuse_columns, template_inputs, unused_columns
from megatron_rl.data.conversation import Message, normal_messages
from megatron_rl.data.files import BadRow, DataRow, find_value, read_rows, refuse_bad_rows
from megatron_rl.data.formats import Values
from megatron_rl.data.prompts import (
    Length,
    data_source,
    read_prompt,
    refuse_empty,
    refuse_overlong,
    unused_notes,
    with_own_system,
)
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import render_sample
from megatron_rl.data.tokenized import Rendered, RenderFn, render_rows
from megatron_rl.errors import DataError
from megatron_rl.messages import short


class AnswerTokens(NamedTuple):
    """An answer behind its prompt."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """One entry a token: whether it is a part of the answer that the model writes."""

    @property
    def num_trained(self) -> int:
        """Tokens of the answer; the first of a sequence is never one, since nothing predicts it."""
        return sum(self.loss_mask[1:])

    @property
    def prompt_len(self) -> int:
        """Tokens before the first one of the answer."""
        return self.loss_mask.index(True) if True in self.loss_mask else len(self.loss_mask)

    def cut(self, limit: int) -> AnswerTokens:
        """Its first tokens."""
        return AnswerTokens(self.token_ids[:limit], self.loss_mask[:limit])

    def after(self, prompt: AnswerTokens) -> AnswerTokens:
        """This answer behind the prompt of another."""
        start, end = self.prompt_len, prompt.prompt_len
        head = (False,) * end
        return AnswerTokens(prompt.token_ids[:end] + self.token_ids[start:], head + self.loss_mask[start:])


@dataclass(frozen=True)
class PreferenceRow:
    """One row, rendered."""

    index: int
    """Number over all rows of the data set, from 0."""
    answers: tuple[AnswerTokens, ...]
    """(chosen, rejected) of a pair; of a labelled row its answer, and one of another row behind its own prompt; of a
    scored row its answer."""
    target: float = 0.0
    """Margin of a pair, label of a labelled row (1 or -1), number of a scored one."""
    data_source: str = ""
    where: str = field(default="", compare=False)
    """File and row, for messages: "train.jsonl row 7"."""


@dataclass(frozen=True)
class PreferenceSet:
    """The usable rows of some files, in file order, and what became of the rest."""

    items: tuple[PreferenceRow, ...]
    num_rows: int
    """Rows read."""
    num_filtered: int
    """Rows left out because an answer of theirs is too long."""
    num_truncated: int
    """Rows with an answer of which only the first tokens are kept."""
    num_cached: int = 0
    """Rows whose tokens were read from data.cache_dir."""
    notes: tuple[str, ...] = ()
    """What a reader of the run's first lines should know of the rows, a line each."""

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Usable rows of each data source."""
        return dict(Counter(row.data_source for row in self.items))


def load_preferences(
    cfg: DataConfig,
    files: Sequence[str],
    renderer: Renderer,
    *,
    kind: RowKind = "pairs",
    margins: bool = False,
    validation: bool = False,
) -> PreferenceSet:
    """Read, check and render all rows of `files`. `validation` only says which key errors name.

    kind: what the loss takes. margins: of pairs, which have the number in cfg.margin_key.

    A row with an answer of more than cfg.max_prompt_length + cfg.max_response_length tokens, prompt included, is an
    error, left out, or cut at its end (cfg.overlong_prompts).

    Raises DataError: unreadable files, rows that cannot be used (all of them, by file and row), overlong rows under the
    policy "error", no row left.
    """
    what = "data.val_files" if validation else "data.train_files"
    rows = read_rows(files, what)
    reads = _Reader.of(cfg, kind, rows, margins)
    passes = [render_rows(cfg, rows, renderer, render) for render in reads.renders]
    found = _Found(cfg.max_prompt_length + cfg.max_response_length, cfg.overlong_prompts == "truncate")
    for row, *rendered in zip(rows, *(one.rows for one in passes), strict=True):
        try:
            refuse_columns(cfg, row.values, renderer.template_names, reads.columns)
            found.add(row, rendered, reads.target(cfg, row.values), data_source(cfg, row))
        except BadRow as fault:
            found.bad.append((row, str(fault)))
            continue
        found.unused.update(unused_columns(cfg, row.values, "sft", reads.columns))
    refuse_bad_rows(found.bad, len(rows), what)
    if cfg.overlong_prompts == "error":
        name = "data.max_prompt_length + data.max_response_length"
        refuse_overlong(found.overlong, len(rows), found.limit, "sequences", name)
    refuse_empty(len(found.items), len(rows), found.limit, what)
    items = found.items if kind != "labelled" else _mismatched(_labelled(found.items), found.limit, what)
    return PreferenceSet(
        items=tuple(replace(item, index=index) for index, item in enumerate(items)),
        num_rows=len(rows),
        num_filtered=len(rows) - len(found.items),
        num_truncated=found.num_truncated,
        num_cached=passes[0].num_cached,
        notes=(*_notes(found.items, renderer), *unused_notes(found.unused, len(rows))),
    )


def preference_reader(cfg: RunConfig) -> Callable[..., PreferenceSet]:
    """load_preferences for the loss of a run."""
    loss = cfg.judged_loss
    return partial(load_preferences, kind=loss.rows, margins=loss.reads_margins)


class _Found:
    """What the rows of a data set have become so far."""

    def __init__(self, limit: int, truncates: bool) -> None:
        self.limit, self._truncates = limit, truncates
        self.items: list[PreferenceRow] = []
        self.bad: list[tuple[DataRow, str]] = []
        self.overlong: list[Length] = []
        self.num_truncated = 0
        self.unused: Counter[str] = Counter()

    def add(self, row: DataRow, rendered: Sequence[Rendered], target: float, source: str) -> None:
        """One more row. Raises BadRow if it cannot be used."""
        fault = next((one.fault for one in rendered if one.fault is not None), None)
        if fault is not None:
            raise BadRow(fault)
        answers = [AnswerTokens(tuple(one.token_ids), tuple(one.loss_mask)) for one in rendered]
        longest = max(len(answer.token_ids) for answer in answers)
        if longest > self.limit:
            self.overlong.append(Length(row, longest))
            if not self._truncates:
                return
            self.num_truncated += 1
            answers = [answer.cut(self.limit) for answer in answers]
        if not all(answer.num_trained for answer in answers):
            kept = f", of which data.overlong_prompts=truncate keeps {self.limit}," if longest > self.limit else ""
            raise BadRow(
                f"its {longest} tokens{kept} hold no answer -- give both answers, raise data.max_prompt_length, or "
                "leave the row out"
            )
        self.items.append(PreferenceRow(0, tuple(answers), target, source, row.where))


class _Reader(NamedTuple):
    """How the rows of a data set are read."""

    renders: tuple[RenderFn, ...]
    """A function for each answer of a row."""
    columns: tuple[str, ...]
    """Columns that other kinds of runs refuse or leave."""
    target: Callable[[DataConfig, Values], float]

    @staticmethod
    def of(cfg: DataConfig, kind: RowKind, rows: Sequence[DataRow], margins: bool) -> _Reader:
        """kind: what the loss takes. Where it takes labelled rows, the first row says whether the data are pairs."""
        sound = next((row.values for row in rows if row.fault is None), {})
        if kind == "pairs" or (kind == "labelled" and find_value(sound, cfg.chosen_key) is not None):
            keys = (cfg.prompt_key, cfg.chosen_key, cfg.rejected_key, *([cfg.margin_key] if margins else []))
            return _Reader((render_chosen, render_rejected), keys, margin_of if margins else lambda cfg, values: 0.0)
        if kind == "scored":
            return _Reader((render_sample,), (cfg.label_key or "score",), score_of)
        return _Reader((render_sample,), (label_column(cfg),), label_of)


def label_column(cfg: DataConfig) -> str:
    """The column that says whether an answer is good."""
    return cfg.label_key or "label"


def label_of(cfg: DataConfig, values: Values) -> float:
    """1 of a good answer, -1 of a bad one. Raises BadRow if the row does not say."""
    column = label_column(cfg)
    label = find_value(values, column)
    if label is None:
        raise BadRow(
            f"there is no {column!r} -- give true for a good answer and false for a bad one, or name the column in "
            f"data.label_key; or give pairs ({cfg.chosen_key!r} and {cfg.rejected_key!r})"
        )
    if label not in (True, False):
        raise BadRow(f"{column!r} is {short(label)} -- give true for a good answer and false for a bad one")
    return 1.0 if label else -1.0


def margin_of(cfg: DataConfig, values: Values) -> float:
    """By how much a pair's better answer shall score higher; 0 if the row does not say."""
    return 0.0 if find_value(values, cfg.margin_key) is None else _number(cfg.margin_key, values)


def score_of(cfg: DataConfig, values: Values) -> float:
    """The number that an answer's score shall be. Raises BadRow if the row has none."""
    column = cfg.label_key or "score"
    if find_value(values, column) is None:
        raise BadRow(f"there is no {column!r} -- give the answer's number, or name the column in data.label_key")
    return _number(column, values)


def _number(column: str, values: Values) -> float:
    number = find_value(values, column)
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise BadRow(f"{column!r} is {short(number)} -- give a number")
    return float(number)


def render_chosen(cfg: DataConfig, renderer: Renderer, values: Values) -> Rendered:
    """A pair's better answer behind its prompt. Raises BadRow if the row cannot be rendered."""
    return _render(cfg, renderer, values, 0)


def render_rejected(cfg: DataConfig, renderer: Renderer, values: Values) -> Rendered:
    """A pair's worse answer behind its prompt. Raises BadRow if the row cannot be rendered."""
    return _render(cfg, renderer, values, 1)


def _render(cfg: DataConfig, renderer: Renderer, values: Values, which: int) -> Rendered:
    keys = (cfg.chosen_key, cfg.rejected_key)
    pair = [find_value(values, key) for key in keys]
    for setting, key, answer in zip(("chosen_key", "rejected_key"), keys, pair, strict=True):
        # A text may be empty: the model ends at once.
        if not isinstance(answer, str | list) or answer == []:
            given = "not there" if answer is None else "empty" if answer == [] else f"a {type(answer).__name__}"
            raise BadRow(f"{key!r} is {given} -- give a string or messages, or name the column in data.{setting}")
        if isinstance(answer, str) and is_chat_text(answer):
            raise BadRow(f"{key!r} is text that holds chat messages -- write it as a list, not as text")
    if type(pair[0]) is not type(pair[1]):
        raise BadRow(f"one of {keys[0]!r} and {keys[1]!r} is text, and the other messages -- give both in one form")
    if isinstance(pair[0], str):
        return _render_text(cfg, renderer, values, cast("list[str]", pair), which)
    return _render_messages(cfg, renderer, values, cast("list[list[object]]", pair), which)


def _render_text(cfg: DataConfig, renderer: Renderer, values: Values, pair: list[str], which: int) -> Rendered:
    inputs = template_inputs(cfg, values)
    if find_value(values, cfg.prompt_key) is not None:
        ids, mask = renderer.sft_ids(read_prompt(cfg, values), pair[which], inputs)
        return Rendered(ids, loss_mask=mask)
    start = common_start(*pair)
    if not 0 < start < min(map(len, pair)):
        raise BadRow(
            f"there is no {cfg.prompt_key!r}, and {cfg.chosen_key!r} and {cfg.rejected_key!r} do not begin with one "
            "that they share and go on differently -- give the prompt in a column of its own"
        )
    ids, mask = renderer.sft_ids(pair[which][:start], pair[which][start:], inputs)
    return Rendered(ids, loss_mask=mask)


def common_start(first: str, second: str) -> int:
    """Characters that two texts share at their start, without the blank before they part, and without a part of a word
    or number: the prompt of a pair that has none of its own.
    """
    end = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    while end and first[end - 1].isalnum() and any(text[end : end + 1].isalnum() for text in (first, second)):
        end -= 1
    return end - 1 if end and first[end - 1] == " " else end


def _render_messages(
    cfg: DataConfig, renderer: Renderer, values: Values, pair: list[list[object]], which: int
) -> Rendered:
    inputs = template_inputs(cfg, values)
    chosen, rejected = (normal_messages(messages, trained=True) for messages in pair)
    context, added = _split(cfg, values, chosen, rejected, which)
    if not added or added[0].get("role") != "assistant":
        raise BadRow(
            "an answer must begin with an assistant message behind the messages that both share -- give the prompt in "
            f"{cfg.prompt_key!r} as messages, and the answers alone in the two columns"
        )
    ids, mask = renderer.conversation_ids([*context, *added], inputs, num_context=len(context))
    return Rendered(ids, loss_mask=mask)


def _split(
    cfg: DataConfig, values: Values, chosen: list[Message], rejected: list[Message], which: int
) -> tuple[list[Message], list[Message]]:
    """(prompt, answer) of a pair of messages."""
    given, answers = find_value(values, cfg.prompt_key), (chosen, rejected)
    begins = chosen[:1] and chosen[0].get("role") == "assistant"
    if isinstance(given, list) or (given is not None and begins):
        prompt = read_prompt(cfg, values)
        if isinstance(prompt, str):
            raise BadRow(
                f"{cfg.prompt_key!r} is a string, and the answers are messages -- give messages in all three, or set "
                "data.string_prompt=user"
            )
        return prompt, answers[which]
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(chosen), len(rejected))
    # Of two equal conversations the last message is the answer.
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared == 0:
        raise BadRow(
            f"there is no {cfg.prompt_key!r} of messages, and {cfg.chosen_key!r} and {cfg.rejected_key!r} share no "
            "message at their start -- give the prompt"
        )
    return with_own_system(cfg, values, chosen[:shared]), answers[which][shared:]


def _labelled(rows: Sequence[PreferenceRow]) -> list[PreferenceRow]:
    """Pairs as single answers: all good ones, then all bad ones, as TRL has them; others as they are."""
    if not any(len(row.answers) > 1 for row in rows):
        return list(rows)
    names = ((0, 1.0, "chosen"), (1, -1.0, "rejected"))
    return [
        replace(row, answers=(row.answers[which],), target=target, where=f"{row.where} {name}")
        for which, target, name in names
        for row in rows
    ]


def _mismatched(rows: Sequence[PreferenceRow], limit: int, what: str) -> list[PreferenceRow]:
    """Each row with a second sequence: its prompt with the answer of the nearest row before it that has another prompt,
    cut at `limit` tokens. The first row's is at the end.
    """
    prompts = [row.answers[0].token_ids[: row.answers[0].prompt_len] for row in rows]
    found: list[PreferenceRow] = []
    for i, row in enumerate(rows):
        other = next((j for j in range(i - 1, i - len(rows), -1) if prompts[j] != prompts[i]), None)
        if other is None:
            raise DataError(
                f"{what}: all rows have one prompt, and KTO estimates a KL from answers to other rows' prompts -- give "
                "rows of several prompts, or use another loss"
            )
        own = row.answers[0]
        found.append(replace(row, answers=(own, rows[other].answers[0].after(own).cut(limit))))
    return found


def _notes(rows: Sequence[PreferenceRow], renderer: Renderer) -> list[str]:
    notes: list[str] = []
    answers = [answer for row in rows for answer in row.answers]
    without_end = sum(not renderer.ends_with_eos(answer.token_ids, answer.loss_mask) for answer in answers)
    if without_end:
        notes.append(f"{without_end:,} of {len(answers):,} answers do not end with an end token (cut, or the template)")
    equal = sum(len(row.answers) > 1 and row.answers[0] == row.answers[1] for row in rows)
    if equal:
        notes.append(f"{equal:,} of {len(rows):,} pairs have two equal answers, of which nothing is learned")
    return notes
