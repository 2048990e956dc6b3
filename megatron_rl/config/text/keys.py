"""The list of all keys, for a reader: `megatron-rl keys` on a terminal, docs/config.md as a page."""

from __future__ import annotations

import difflib
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast, get_args, get_origin

from megatron_rl.config.sections.base import OneOf
from megatron_rl.config.text.schema import Key, Schema

_NAMES: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict: "mapping",
    Any: "any value",
}
_BOUNDS = (("gt", "above {:g}"), ("ge", "at least {:g}"), ("lt", "below {:g}"), ("le", "at most {:g}"))
_HEAD = """# Every key of a run

Written by `megatron-rl keys --write docs/config.md`; a test compares this page with the code. `megatron-rl keys WORD`
shows the same on a terminal; `megatron-rl check` refuses every key that is not here. verl's names are read too.
"""


def find_keys(schema: Schema, words: Sequence[str]) -> list[Key]:
    """Keys that lie in a section of this name, or whose name or meaning holds every word (case does not count).

    All keys where no word is given, and no key where nothing fits.
    """
    if not words:
        return list(schema.keys.values())
    if len(words) == 1:
        section = words[0].rstrip(".") + "."
        inside = [key for key in schema.keys.values() if key.name.startswith(section) or key.name == words[0]]
        if inside:
            return inside
    wanted = [word.lower() for word in words]
    return [key for key in schema.keys.values() if all(word in f"{key.name} {key.doc}".lower() for word in wanted)]


def near_words(schema: Schema, words: Sequence[str]) -> list[str]:
    """Names of sections and keys that are close to words of which no key is known, best first."""
    known = [*schema.sections, *schema.keys, *(key.leaf for key in schema.keys.values())]
    return [name for word in words for name in difflib.get_close_matches(word, sorted(set(known)), n=3, cutoff=0.7)]


def kind_text(annotation: object) -> str:
    """What a value is: "whole number, above 0", "tokenizer | plain", "list of text", "text; or nothing (null)"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return ", ".join([_choices_of(arguments[1:]) or kind_text(arguments[0]), *_bounds(arguments[1:])])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if type(None) in arguments:
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return f"{kind_text(kind)}; or nothing (null)"
    if origin is list:
        return f"list of {kind_text(arguments[0])}"
    if origin is dict:
        value = "" if arguments[1] is Any else f" of {kind_text(arguments[1])}"
        return f"mapping{value} (its keys are yours)"
    return _NAMES[annotation]


def _choices_of(metadata: Sequence[object]) -> str:
    return next((" | ".join(one.shown) for one in metadata if isinstance(one, OneOf)), "")


def _bounds(metadata: Sequence[object]) -> Iterator[str]:
    # pydantic.Field keeps its bounds in a list of its own; annotated_types stand by themselves.
    bounds = [one for outer in metadata for one in getattr(outer, "metadata", None) or [outer]]
    for name, text in _BOUNDS:
        for bound in bounds:
            if getattr(bound, name, None) is not None:
                yield text.format(getattr(bound, name))


def default_text(key: Key) -> str:
    """The default as one writes it, "required" or "nothing"; a long text is cut."""
    if key.required:
        return "required"
    return _written(key.default)


def _written(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_written(item) for item in cast('list[object]', value))}]"
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_text(keys: Sequence[Key]) -> str:
    """One key after the other: name, default and kind on a line, its meaning below."""
    blocks: list[str] = []
    for key in keys:
        default = "required" if key.required else f"default {default_text(key)}"
        blocks.append(f"{key.name}   {default}   ({kind_text(key.annotation)})\n    {' '.join(key.doc.split())}")
    return "\n".join(blocks)


def as_markdown(schema: Schema) -> str:
    """docs/config.md: a table for each section."""
    parts = [_HEAD]
    section: str | None = None
    for key in schema.keys.values():
        if key.name.rpartition(".")[0] != section:
            section = key.name.rpartition(".")[0]
            parts.append(f"\n## {section}\n\n{_short_of(schema, section)}")
            parts.append("| key | kind | default | meaning |\n|---|---|---|---|\n")
        cells = (f"`{key.leaf}`", kind_text(key.annotation), f"`{default_text(key)}`", " ".join(key.doc.split()))
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def _short_of(schema: Schema, section: str) -> str:
    """How the keys of a Choice can be written too; "" for other sections."""
    choice = schema.choices.get(section)
    if choice is None:
        return ""
    short = ", ".join(f"`{key}`" for key in choice.short)
    text = (
        f"`{section}: name`, or `{section}: {{type: name, setting: value}}` with settings of that type. verl's flat "
        f"keys mean the same: {short}."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n\n"
