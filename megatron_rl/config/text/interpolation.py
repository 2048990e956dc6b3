"""`${...}` in a verl config, as OmegaConf resolves it: other keys, oc.select, oc.env and oc.decode.

OmegaConf itself is not needed: what verl's configs use of it is little, and here what a text may grow to is bounded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias, cast

from megatron_rl.config.text.reader import Entry, parse_value
from megatron_rl.config.text.schema import join_key, split_key
from megatron_rl.errors import Fault
from megatron_rl.messages import cut

Tree: TypeAlias = "dict[str, Tree]"
"""Names in names, down to keys, which are empty."""

_MOST = 50_000
"""Most characters and values that all interpolations of a config may come to."""
_DEEPEST = 40
"""Most interpolations within one another."""
_RESOLVER = re.compile(r"\s*([A-Za-z_][\w.]*)\s*:(.*)", re.DOTALL)
_READ = ("oc.select", "oc.env", "oc.decode")
_MISSING = object()
_CURE = "write the value out"


class _Unresolved(Exception):
    """An interpolation that cannot be resolved; its text is the reason."""


class _TooMuch(_Unresolved):
    """The interpolations of a config come to more than is read."""


def resolve_all(entries: list[Entry]) -> tuple[list[Entry], list[Fault]]:
    """Entries with each `${...}` replaced by what it stands for, and what is wrong with those that stand for nothing.

    A reference sees what all sources together hold, as OmegaConf's does after merging. No entries: what they come to
    is too much to read.
    """
    if not any(_holds(entry.value) for entry in entries):
        return entries, []
    work = _Resolver(entries)
    found: list[Entry] = []
    faults: list[Fault] = []
    last = {entry.key: entry for entry in entries}
    for entry in entries:
        # Hydra's list of defaults names files; its own interpolations are Hydra's.
        if last[entry.key] is not entry or not _holds(entry.value) or entry.key == "defaults":
            found.append(entry)
            continue
        try:
            value = work.value(entry.key)
        except _Unresolved as problem:
            if isinstance(problem, _TooMuch):
                return [], [Fault(entry.key, _short(entry.value), f"{problem} [set {entry.where}]", _CURE)]
            faults.append(Fault(entry.key, _short(entry.value), f"{problem} [set {entry.where}]", _CURE))
            continue
        found += _flat(entry, value)
    return found, faults


def _holds(value: object) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(_holds(one) for one in cast("dict[str, object]", value).values())
    return isinstance(value, list) and any(_holds(one) for one in cast("list[object]", value))


def _flat(entry: Entry, value: object) -> list[Entry]:
    """A reference to a section becomes the leaves of the section."""
    if not isinstance(value, dict) or not value:
        return [replace(entry, value=value)]
    leaves: list[Entry] = []
    for name, inner in cast("dict[str, object]", value).items():
        leaves += _flat(replace(entry, key=f"{entry.key}.{join_key([name])}"), inner)
    return leaves


class _Resolver:
    """Values of keys, each resolved once. _left: characters and values that may still be made."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._raw: dict[str, object] = {}
        self._tree: Tree = {}
        for entry in entries:
            self._raw[entry.key] = entry.value
        for key in self._raw:
            node = self._tree
            for name in split_key(key):
                node = node.setdefault(name, {})
        self._known: dict[str, object] = {}
        self._failed: dict[str, _Unresolved] = {}
        self._open: list[str] = []
        self._left = _MOST

    def value(self, key: str) -> object:
        """What a key holds, without interpolations. Raises _Unresolved."""
        if key in self._known:
            return self._known[key]
        if key in self._failed:
            raise self._failed[key]
        if key in self._open:
            raise _Unresolved(f"the interpolation leads back to itself ({' -> '.join([*self._open, key])})")
        if len(self._open) >= _DEEPEST:
            raise _Unresolved(f"more than {_DEEPEST} interpolations lead to one another")
        self._open.append(key)
        try:
            self._known[key] = self._inside(self._raw[key], key)
        except _Unresolved as problem:
            self._failed[key] = problem
            raise
        finally:
            self._open.pop()
        return self._known[key]

    def _inside(self, value: object, key: str) -> object:
        if isinstance(value, str):
            return self._text(value, key, 0)
        if isinstance(value, list):
            return [self._inside(one, key) for one in cast("list[object]", value)]
        if isinstance(value, dict):
            return {name: self._inside(one, key) for name, one in cast("dict[str, object]", value).items()}
        return value

    def _text(self, text: str, key: str, depth: int) -> object:
        """A text with interpolations: the value itself where it is one and nothing else, a text otherwise."""
        if depth > _DEEPEST:
            raise _Unresolved(f"interpolations stand more than {_DEEPEST} deep within one another")
        pieces: list[object] = []
        place = 0
        while (start := text.find("${", place)) >= 0:
            end = _closing(text, start + 2)
            if start > place:
                pieces.append(text[place:start])
            pieces.append(self._copied(self._one(text[start + 2 : end], key, depth + 1)))
            place = end + 1
        if place < len(text):
            pieces.append(text[place:])
        if len(pieces) == 1:
            return pieces[0]
        for piece in pieces:
            if isinstance(piece, dict | list):
                raise _Unresolved("a list or a section cannot be a part of a text")
        return "".join("null" if piece is None else str(piece) for piece in pieces)

    def _one(self, inner: str, key: str, depth: int) -> object:
        resolver = _RESOLVER.match(inner)
        if resolver is None:
            name = str(self._text(inner, key, depth)).strip()
            found = self._select(name, key)
            if found is _MISSING:
                raise _Unresolved(f"${{{inner}}} names no key of this config")
            return found
        name = resolver.group(1)
        if name not in _READ:
            raise _Unresolved(f"${{{name}:...}} is not read here ({', '.join(_READ)} are)")
        arguments = [self._argument(one, key, depth) for one in _split(resolver.group(2))]
        if name == "oc.select" and len(arguments) in (1, 2):
            found = self._select(str(arguments[0]), key)
            return (arguments[1] if len(arguments) == 2 else None) if found in (_MISSING, "???") else found
        if name == "oc.env" and len(arguments) in (1, 2):
            return self._environment(arguments)
        if name == "oc.decode" and len(arguments) == 1:
            return _parsed(arguments[0]) if isinstance(arguments[0], str) else arguments[0]
        raise _Unresolved(f"${{{inner}}} has {len(arguments)} arguments, and {name} takes another number")

    def _environment(self, arguments: list[object]) -> object:
        held = os.environ.get(str(arguments[0]))
        if held is not None:
            return held
        if len(arguments) == 2:
            return None if arguments[1] is None else str(arguments[1])
        raise _Unresolved(f"the environment variable {arguments[0]} is not set")

    def _argument(self, text: str, key: str, depth: int) -> object:
        text = text.strip()
        value = self._text(text, key, depth)
        return _parsed(value) if isinstance(value, str) and "${" not in text else value

    def _select(self, name: str, key: str) -> object:
        """The value of another key, or the mapping of a section; a leading dot counts from the key's own section."""
        try:
            parts = _absolute(name, key)
        except ValueError:
            raise _Unresolved(f"${{{name}}} is no key") from None
        full = join_key(parts)
        if full in self._raw:
            return self.value(full)
        node = self._tree
        for place, part in enumerate(parts):
            if part not in node:
                return _MISSING
            above = join_key(parts[: place + 1])
            # A key that is an interpolation may stand for a section, in which the rest of the name lies.
            if above in self._raw:
                return _within(self.value(above), parts[place + 1 :])
            node = node[part]
        return self._section(full, node)

    def _section(self, prefix: str, node: Tree) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, inner in node.items():
            key = f"{prefix}.{join_key([name])}"
            found[name] = self.value(key) if key in self._raw else self._section(key, inner)
        return found

    def _copied(self, value: object) -> object:
        """`value` as a copy that is counted: references to references can grow without end."""
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise _TooMuch(f"the interpolations of this config come to more than {_MOST} characters and values")
        if isinstance(value, list):
            return [self._copied(one) for one in cast("list[object]", value)]
        if isinstance(value, dict):
            return {name: self._copied(one) for name, one in cast("dict[str, object]", value).items()}
        return value


def _within(value: object, parts: list[str]) -> object:
    for part in parts:
        if isinstance(value, list) and part.isdecimal() and int(part) < len(cast("list[object]", value)):
            value = cast("list[object]", value)[int(part)]
        elif isinstance(value, dict) and part in value:
            value = cast("dict[str, object]", value)[part]
        else:
            return _MISSING
    return value


def _absolute(name: str, key: str) -> list[str]:
    dots = len(name) - len(name.lstrip("."))
    rest = name.lstrip(".").replace("[", ".").replace("]", "").lstrip(".")
    if not dots:
        return split_key(rest)
    above = split_key(key)
    if dots > len(above):
        raise ValueError(name)
    return [*above[: len(above) - dots], *split_key(rest)]


def _closing(text: str, place: int) -> int:
    """Place of the brace that closes the one before `place`."""
    depth = 1
    while place < len(text):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return place
        place += 1
    raise _Unresolved("an interpolation lacks its closing brace")


def _split(text: str) -> list[str]:
    """Arguments at commas that stand in no brackets and no quotes."""
    parts: list[str] = []
    depth, quote, start = 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _parsed(text: str) -> object:
    value, problem = parse_value(text)
    if problem:
        raise _Unresolved(f"{_short(text)!r} is not YAML: {problem}")
    return value


def _short(value: object) -> str:
    return cut(str(value), 120)
