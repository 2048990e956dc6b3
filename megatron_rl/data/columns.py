"""The columns of a row: what reaches the chat template beside the messages, what is refused, what is not used.

To the template (TemplateInputs):
    tools                  data.tools_key: a list of mappings, one mapping, or JSON text of either; else metadata.tools
    enable_thinking        data.enable_thinking_key: true or false
    chat_template_kwargs   a mapping of the template's keywords, or JSON text of one; or apply_chat_template_kwargs
    system                 a system message before the others; or system_prompt, system_message
Refused are columns whose content changes what the model should be given or trained on, and that cannot be used.
Every other column is counted, for the run's first lines. Empty values say nothing, since parquet pads columns.
No torch and no tokenizer here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megatron_rl.config.sections.data import RESERVED_KEYWORDS, DataConfig
from megatron_rl.data.conversation import MEDIA, TEXT_ALONE, is_empty, mask_says
from megatron_rl.data.files import BadRow, find_value
from megatron_rl.data.formats import Values, json_text
from megatron_rl.messages import short

GROUND_TRUTH_KEYS = ("ground_truth", "answer", "label")
EXTRA_INFO_KEYS = ("extra_info", "metadata")
CONVERSATION_KEY = "conversations"
"""ShareGPT's column, read where a row has none of the configured ones."""
COMPLETION_KEY = "completion"
"""TRL's name of the response, read where a row has no response."""
KEYWORD_COLUMNS = ("chat_template_kwargs", "apply_chat_template_kwargs")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
HARMLESS = ("ability", "index", "split")
"""Columns of verl's rows that say where a row comes from."""
ROW_MASKS = (
    "loss_mask", "step_loss_mask", "completion_mask", "assistant_masks", "weight", "loss_weight", "sample_weight",
    "train",
)  # fmt: skip
"""Columns that say what to train on, and how much, in other trainers."""
ONE_TURN = "single_turn_agent"
"""verl's agent that does what happens here: one prompt, one response."""


@dataclass(frozen=True)
class TemplateInputs:
    """What a row gives the chat template beside its messages. system: already a message where there are messages."""

    tools: list[Values] | None = None
    keywords: Values = field(default_factory=dict)
    system: str | None = None
    system_column: str = "system"

    def names(self) -> list[str]:
        """What is given, as errors call it."""
        found = ["tools"] if self.tools else []
        return found + ([self.system_column] if self.system else []) + list(self.keywords)


class _Refused(NamedTuple):
    is_bad: Callable[[object], bool]
    reason: str
    cure: str


def _given(value: object) -> bool:
    return not is_empty(value)


_AGENT = "several turns and tools that run while sampling are not there, so the row would be trained as one turn"
_ONE_TURN_CURE = "take it out to train on one turn"
_PAIR = "pairs of answers are for algorithm.name dpo and reward_model"
_PAIR_CURE = "set one of these, or give the answer to train on in data.response_key or the messages, and take it out"
_AGENTS = {
    "agent_name": _Refused(lambda value: _given(value) and value != ONE_TURN, _AGENT, _ONE_TURN_CURE),
    "need_tools_kwargs": _Refused(lambda value: _given(value) and value is not False, _AGENT, _ONE_TURN_CURE),
    "tools_kwargs": _Refused(_given, _AGENT, _ONE_TURN_CURE),
    "interaction_kwargs": _Refused(_given, _AGENT, _ONE_TURN_CURE),
}
"""verl's: at top level or in extra_info."""
_COLUMNS = {
    **{name: _Refused(_given, "models here read text alone", TEXT_ALONE) for name in MEDIA},
    **_AGENTS,
    **{
        name: _Refused(
            lambda value: _given(value) and mask_says(value) is not True,
            "masks and weights of rows, messages or tokens are not used",
            "write one row for each response (prompt and response keys), and take it out",
        )
        for name in ROW_MASKS
    },
    **{name: _Refused(_given, _PAIR, _PAIR_CURE) for name in ("chosen", "rejected", "rejected_response")},
    "history": _Refused(_given, "earlier turns in a column of their own are not used", "write them as messages"),
    "functions": _Refused(_given, "functions are handed to the chat template as tools", "name the column tools"),
}


def template_inputs(cfg: DataConfig, values: Values) -> TemplateInputs:
    """What a row gives the chat template. Raises BadRow if a column does not hold what its name says."""
    tools_column = _tools_column(cfg, values)
    tools = _tools(find_value(values, tools_column), tools_column) if tools_column else None
    given = [name for name in SYSTEM_COLUMNS if _given(values.get(name))]
    other = next((name for name in given if values[name] != values[given[0]]), None)
    if other is not None:
        raise BadRow(f"there are {given[0]!r} and {other!r}, and they differ -- keep one of the two")
    system = values[given[0]] if given else None
    if system is not None and not isinstance(system, str):
        raise BadRow(f"{given[0]!r} is {short(system)} -- give a string")
    return TemplateInputs(tools, _keywords(cfg, values), system, given[0] if given else "system")


def template_columns(cfg: DataConfig) -> tuple[str, ...]:
    """Columns that template_inputs reads."""
    return (cfg.tools_key, cfg.enable_thinking_key, *KEYWORD_COLUMNS, *SYSTEM_COLUMNS)


def rendered_values(cfg: DataConfig, values: Values) -> list[Any]:
    """Every value of a row that its tokens depend on."""
    keys = (cfg.prompt_key, cfg.response_key, cfg.messages_key, CONVERSATION_KEY, COMPLETION_KEY)
    keys += (cfg.chosen_key, cfg.rejected_key)
    tools_column = _tools_column(cfg, values)
    tools = find_value(values, tools_column) if tools_column else None
    return [tools, *(find_value(values, key) for key in (*keys, *template_columns(cfg)))]


def refuse_columns(
    cfg: DataConfig, values: Values, template_names: Collection[str] = (), read: Collection[str] = ()
) -> None:
    """Raise a BadRow that names every column whose content is lost, and what to do.

    template_names: variables that the chat template reads. read: columns that the caller reads itself.
    """
    own = (*_own(cfg), *read)
    faults = [
        f"{name!r} = {short(values[name])} is not used: {refused.reason} -- {refused.cure}"
        for name, refused in _COLUMNS.items()
        if name in values and refused.is_bad(values[name]) and name not in own
    ]
    for column in info_keys(cfg):
        info = find_value(values, column)
        faults += [
            f"{f'{column}.{name}'!r} = {short(info[name])} is not used: {refused.reason} -- {refused.cure}"
            for name, refused in _AGENTS.items()
            if isinstance(info, dict) and name in info and refused.is_bad(info[name])
        ]
    if cfg.prompt_key == "instruction" and _given(values.get("input")):
        faults.append(
            "'input' is not used: the prompt is 'instruction' alone (data.prompt_key) "
            "-- join the two in one column, or write messages"
        )
    for name in template_names:
        if _given(values.get(name)) and name not in (*template_columns(cfg), *own, *_COLUMNS, *STANDARD_NAMES):
            faults.append(
                f"{name!r} is not used, and the chat template reads a keyword of that name "
                "-- put it into a mapping in the column chat_template_kwargs, or name the column otherwise"
            )
    if faults:
        raise BadRow("; ".join(faults))


STANDARD_NAMES = frozenset(("messages", "tools", "add_generation_prompt", "prompt"))
"""Names of templates' variables that mean no keyword."""


def unused_columns(
    cfg: DataConfig, values: Values, kind: Literal["rl", "sft"], read: Collection[str] = ()
) -> list[str]:
    """Columns of a row that have a value and that nothing reads. read: columns that the caller reads itself."""
    used = {*read, *template_columns(cfg), cfg.data_source_key, *HARMLESS, *_COLUMNS}
    used.update(_rl_keys(cfg, values) if kind == "rl" else _sft_keys(cfg, values))
    tools_column = _tools_column(cfg, values)
    used.update([tools_column] if tools_column else [])
    heads = {key if key in values else key.partition(".")[0] for key in used}
    return [name for name, value in values.items() if name not in heads and _given(value)]


def prompt_column(cfg: DataConfig, values: Values) -> str:
    """The column of a row's prompt: data.prompt_key, or ShareGPT's where there is none."""
    if find_value(values, cfg.prompt_key) is None and values.get(CONVERSATION_KEY) is not None:
        return CONVERSATION_KEY
    return cfg.prompt_key


def messages_column(cfg: DataConfig, values: Values) -> str:
    """The column of a row's conversation: data.messages_key, or ShareGPT's where there is none."""
    if find_value(values, cfg.messages_key) is None and values.get(CONVERSATION_KEY) is not None:
        return CONVERSATION_KEY
    return cfg.messages_key


def response_column(cfg: DataConfig, values: Values) -> str:
    """The column of a row's response: data.response_key, or TRL's where there is none."""
    if find_value(values, cfg.response_key) is None and values.get(COMPLETION_KEY) is not None:
        return COMPLETION_KEY
    return cfg.response_key


def first_key(values: Values, keys: Iterable[str]) -> str | None:
    """The first of `keys` that the row has a value for."""
    return next((key for key in keys if find_value(values, key) is not None), None)


def truth_keys(cfg: DataConfig) -> tuple[str, ...]:
    """Where a ground truth is looked for, in this order."""
    return ("reward_model.ground_truth", *GROUND_TRUTH_KEYS) if cfg.label_key is None else (cfg.label_key,)


def info_keys(cfg: DataConfig) -> tuple[str, ...]:
    """Where a reward's extra_info is looked for, in this order."""
    return EXTRA_INFO_KEYS if cfg.metadata_key is None else (cfg.metadata_key,)


def _own(cfg: DataConfig) -> tuple[str, ...]:
    """Columns that the config names. They are read, whatever their names mean by default."""
    named = (cfg.prompt_key, cfg.response_key, cfg.messages_key, cfg.label_key, cfg.metadata_key, cfg.data_source_key)
    return tuple(name.partition(".")[0] for name in named if name)


def _rl_keys(cfg: DataConfig, values: Values) -> list[str]:
    found = (first_key(values, truth_keys(cfg)), first_key(values, info_keys(cfg)))
    return [prompt_column(cfg, values), *(key for key in found if key)]


def _sft_keys(cfg: DataConfig, values: Values) -> list[str]:
    conversation = messages_column(cfg, values)
    if find_value(values, conversation) is not None:
        return [conversation]
    return [cfg.prompt_key, response_column(cfg, values)]


def _tools_column(cfg: DataConfig, values: Values) -> str | None:
    inner = f"{cfg.metadata_key or 'metadata'}.tools"
    return first_key(values, (cfg.tools_key, inner))


def _tools(value: object, column: str) -> list[Values] | None:
    """Tools as a list of mappings; None if there are none."""
    found = _from_json(value, column)
    if is_empty(found):
        return None
    listed = [found] if isinstance(found, dict) else found
    tools = [_from_json(tool, column) for tool in listed] if isinstance(listed, list) else [listed]
    bad = next((tool for tool in tools if not isinstance(tool, dict) or not tool), None)
    if bad is not None:
        raise BadRow(
            f"{column!r} holds {short(bad)} -- give a list of mappings (or JSON text of it), one for each tool"
        )
    return tools


def _keywords(cfg: DataConfig, values: Values) -> Values:
    found: dict[str, tuple[Any, str]] = {}
    for column in KEYWORD_COLUMNS:
        given = _from_json(values.get(column), column)
        if is_empty(given):
            continue
        if not isinstance(given, dict):
            raise BadRow(f"{column!r} is {short(given)} -- give a mapping of the chat template's keywords")
        _add(found, {name: value for name, value in given.items() if value is not None}, column)
    thinking = find_value(values, cfg.enable_thinking_key)
    if _given(thinking):
        _add(found, {"enable_thinking": thinking}, cfg.enable_thinking_key)
    reserved = [name for name in found if name in RESERVED_KEYWORDS]
    if reserved:
        column = found[reserved[0]][1]
        raise BadRow(
            f"{column!r} holds {reserved[0]!r}, which is no keyword of a row's -- {RESERVED_KEYWORDS[reserved[0]]}"
        )
    return {name: value for name, (value, _) in found.items()}


def _add(found: dict[str, tuple[Any, str]], given: Values, column: str) -> None:
    for name, value in given.items():
        plain = _flag(value, name, column) if name == "enable_thinking" else value
        before, other = found.setdefault(name, (plain, column))
        if before != plain:
            raise BadRow(f"{name} is {before!r} in {other!r} and {plain!r} in {column!r} -- keep one of the two")


def _flag(value: object, name: str, column: str) -> bool:
    """A real boolean: templates compare with false, which neither 0 nor the text "false" equals."""
    plain = value.strip().lower() if isinstance(value, str) else value
    if plain in (True, False):
        return bool(plain)
    if plain in ("true", "false"):
        return plain == "true"
    raise BadRow(f"{column!r} has {name} = {short(value)} -- give true or false")


def _from_json(value: object, column: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        found, fault = json_text(value)
    except ValueError as error:
        raise BadRow(
            f"{column!r} is text that is not JSON ({error}) -- give a list or mapping, or JSON text"
        ) from error
    if fault is not None:
        raise BadRow(f"in the JSON text of {column!r}: {fault}")
    return found
