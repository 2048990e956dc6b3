"""From a value that does not fit its key to a Fault that says what to write."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args, get_origin

from megatron_rl.config.sections.base import OneOf
from megatron_rl.config.text.schema import Key, Schema
from megatron_rl.errors import Fault

MISSING = "is required and was not given"

_INTERPOLATION = re.compile(r"\$\{[^}]*\}")

_LARGEST = 3.4028234663852886e38
"""Of float32, in which training computes."""

# Kind of pydantic error -> (what is wrong, what to write).
_TYPES = {
    "int": ("is not a whole number", "write a whole number"),
    "float": ("is not a number", "write a number"),
    "finite": ("is not a finite number", "write a number"),
    "large": ("is too large for a number of 32 bits", "write a number below 3.4e38"),
    "bool": ("is neither true nor false", "write true or false"),
    "string": ("is not text", "put it in quotes"),
    "list": ("is not a list", "write a list, for instance [a, b]; [] is the empty one"),
    "dict": ("is not a mapping", "write a mapping, for instance {name: value}; {} is the empty one"),
}
_BOUNDS = {
    "greater_than": ("gt", "must be above", "write a number above"),
    "greater_than_equal": ("ge", "must be at least", "write a number of at least"),
    "less_than": ("lt", "must be below", "write a number below"),
    "less_than_equal": ("le", "must be at most", "write a number of at most"),
}


def unknown_key(schema: Schema, name: str, value: object) -> Fault:
    """The fault of a key that does not exist, with the keys that may have been meant."""
    parent = schema.keys.get(name.rpartition(".")[0])
    if name in schema.sections:
        inside = [key for key in schema.keys if key.startswith(name + ".")]
        cure = f"set a key in it, for instance {inside[0]}={_example(schema.keys[inside[0]])}"
        return Fault(name, value, "is a section, not a key with a value", cure)
    if parent is not None and parent.takes_list:
        leaf = name.rpartition(".")[2]
        return Fault(
            name,
            value,
            f"{parent.name} is a list: {leaf!r} names no key in it",
            f"write {parent.name}=[a, b]",
        )
    if parent is not None:
        return Fault(name, value, f"{parent.name} is a single value, with no keys in it", _about(parent))
    meant, section = schema.suggest(name), schema.section_of(name)
    hints = [f"did you mean {' or '.join(meant)}?"] if meant else []
    if section and not any(key.startswith(section + ".") for key in meant):
        known = [key.leaf for key in schema.keys.values() if key.name.rpartition(".")[0] == section]
        hints.append(f"keys of {section}: {', '.join(known)}")
    if not section and not meant:
        hints.append(f"sections: {', '.join(sorted(part for part in schema.sections if '.' not in part))}")
    return Fault(name, value, "there is no such key", " ".join(hints))


def bad_value(key: Key, value: object) -> Fault | None:
    """The fault of a value that pydantic would take and its writer did not mean; None when there is none."""
    if isinstance(value, bool) and key.number:
        return _type_fault(key, key.name, value, key.number)
    if not _all_finite(value):
        return _type_fault(key, key.name, value, "finite")
    if key.number and not key.takes_list and _too_large(value):
        return _type_fault(key, key.name, value, "large")
    text = _text_in(value)
    if not key.free and _INTERPOLATION.search(text):
        return Fault(key.name, value, "interpolations such as ${...} are not read", "write the value out")
    if not key.free and text == "???":
        return Fault(key.name, value, "??? stands for a value that must be given", _about(key))
    return None


def _all_finite(value: object) -> bool:
    """Whether no number in it, at any depth, is infinite or NaN: such a number passes bounds that it should not."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_all_finite(item) for item in cast("dict[object, object]", value).values())
    return not isinstance(value, list) or all(_all_finite(item) for item in cast("list[object]", value))


def _too_large(value: object) -> bool:
    """A number, or the text of one, that no float32 holds."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
        # Infinity and NaN in words are for the check of the type.
        return math.isfinite(value) and abs(value) > _LARGEST
    return isinstance(value, int | float) and abs(value) > _LARGEST


def _text_in(value: object) -> str:
    if isinstance(value, str):
        return value
    items = cast("list[object]", value) if isinstance(value, list) else []
    return " ".join(item for item in items if isinstance(item, str))


def refused_value(schema: Schema, error: Mapping[str, Any]) -> tuple[str, Fault]:
    """(key, Fault) of one of pydantic's errors on a RunConfig."""
    parts: tuple[object, ...] = error["loc"]
    name, shown = "", ""
    chosen: dict[str, Key] = {}
    for part in parts:
        if name in schema.choices and not chosen:
            chosen = schema.choices[name].settings[str(part)]
        elif name in schema.keys:
            shown += f"[{part}]"
        else:
            name = shown = f"{name}.{part}" if name else str(part)
    key, kind, value = schema.keys[name], str(error["type"]), error["input"]
    key = chosen.get(key.leaf, key)
    if kind == "missing":
        return name, Fault(name, None, MISSING, f"add it: {_about(key)}")
    if kind in _BOUNDS:
        bound, reason, cure = _BOUNDS[kind]
        limit = f"{error['ctx'][bound]:g}"
        return name, Fault(shown, value, f"{reason} {limit}", f"{cure} {limit}{_default(key)}")
    if kind == "literal_error":
        return name, refused_choice(key, shown, value)
    return name, _type_fault(key, shown, value, kind.partition("_")[0], str(error["msg"]))


def refused_choice(key: Key, shown: str, value: object) -> Fault:
    """The fault of a value that is none of a key's choices. shown: the key as the reader knows it."""
    choices = [str(choice) for choice in _choices(key.annotation)]
    close = difflib.get_close_matches(str(value).lower(), choices, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return Fault(shown, value, "is none of the choices", f"{hint}choices: {', '.join(choices)}")


def _choices(annotation: object) -> list[Any]:
    if isinstance(annotation, OneOf):
        return list(annotation.shown)
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]


def _type_fault(key: Key, shown: str, value: object, kind: str, message: str = "") -> Fault:
    if value is None:
        cure = f"give one: {_about(key)}" if key.required else f"give one, or leave the key out{_default(key)}"
        return Fault(shown, None, "needs a value", cure)
    reason, cure = _TYPES.get(kind, (message, "see what the key means"))
    inner = next(iter(cast("dict[str, object]", value)), None) if isinstance(value, dict) else None
    if key.flat and shown != key.name and inner is not None:
        name = f"{shown.removeprefix(key.name).strip('[]')}.{inner}"
        return Fault(
            shown, cast(object, value), f"{reason}, but a mapping", f'names stand as they are, dots too: "{name}": ...'
        )
    if kind == "string" and shown == key.name and isinstance(value, bool | int | float):
        cure = f'put it in quotes: {key.name}: "{value}" in YAML, {key.name}=\'"{value}"\' in a shell'
    doc = f" ({key.doc.rstrip('.')})" if key.doc else ""
    return Fault(shown, cast(object, value), reason, f"{cure}{_default(key)}{doc}")


def _default(key: Key) -> str:
    return "" if key.required or key.default is None else f"; the default is {_written(key.default)}"


def _about(key: Key) -> str:
    return f"{key.name}={_example(key)}" + (f" ({key.doc.rstrip('.')})" if key.doc else "")


def _example(key: Key) -> str:
    return "..." if key.required or key.default is None else _written(key.default)


def _written(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, cast('list[object]', value)))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
