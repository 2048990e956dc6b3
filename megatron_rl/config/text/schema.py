"""The keys of a run, read from the section classes: what exists, what it means, what it is when not given."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_origin

from pydantic_core import PydanticUndefined

from megatron_rl.errors import Fault

_PLAIN = re.compile(r"""[^."'=\s]+""")
_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^."'=]+))\s*(\.|$)""")


class Names(Protocol):
    """Which mappings have keys of the user's own."""

    def free(self, name: str) -> bool:
        """`name` is such a mapping, or lies in one."""
        ...

    def flat_prefix(self, name: str) -> str:
        """The mapping that `name` lies in, with a dot, where its values are no mappings themselves; else ""."""
        ...


def join_key(parts: Sequence[str]) -> str:
    """Names as one dotted key; a name with a dot, quotes, blanks or '=' stands in quotes.

    Example: join_key(["data", "mix_weights", "org/set-1.5"]) == 'data.mix_weights."org/set-1.5"'
    """
    return ".".join(part if _PLAIN.fullmatch(part) else f'"{_escaped(part)}"' for part in parts)


def _escaped(part: str) -> str:
    return part.replace("\\", "\\\\").replace('"', '\\"')


def split_key(key: str) -> list[str]:
    """The names of a dotted key, without their quotes. ValueError where a name is empty or a quote is not closed."""
    parts: list[str] = []
    place = 0
    while True:
        match = _PART.match(key, place)
        if match is None:
            raise ValueError(key)
        quoted, single, plain, end = match.groups()
        name = (
            re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else single if single is not None else plain.strip()
        )
        if not name:
            raise ValueError(key)
        parts.append(name)
        place = match.end()
        if not end:
            return parts


def split_setting(text: str, names: Names) -> tuple[list[str], str, Fault | None]:
    """(names of the key, text of the value, what is wrong) of `key=value`; Hydra's + and ++ before it say nothing."""
    place = _equals(text)
    key = text[: len(text) if place < 0 else place].strip().lstrip("+")
    if place < 0 and set(key) & set("\"'"):
        return [], "", Fault(text, None, "a quote in the key is not closed", "close it before the '='")
    if place < 0 or not key:
        cure = f"write key=value, for instance {key or 'actor.tp'}=..."
        return [], "", Fault(text, None, "is no setting: it has no key or no '='", cure)
    flat = names.flat_prefix(key)
    rest = key.removeprefix(flat)
    if flat and rest and rest[:1] not in ('"', "'"):
        return [*flat[:-1].split("."), rest], text[place + 1 :], None
    try:
        return split_key(key), text[place + 1 :], None
    except ValueError:
        cure = 'separate names by single dots; one with a dot stands in quotes: data.mix_weights."org/set-1.5"=2'
        return [], "", Fault(key, text[place + 1 :], "is no key: a name in it is empty, or a quote is not closed", cure)


def _equals(text: str) -> int:
    """Place of the first '=' outside quotes; -1 where there is none."""
    quote = ""
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'" and text[:place].endswith("."):
            quote = sign
        elif sign == "=":
            return place
    return -1


@dataclass(frozen=True)
class Key:
    """One dotted key. required: it has no default. free: a mapping whose own keys are the user's."""

    name: str
    annotation: Any
    default: Any
    required: bool
    doc: str

    @property
    def leaf(self) -> str:
        """The part after the last dot."""
        return self.name.rpartition(".")[2]

    @property
    def free(self) -> bool:
        return dict in _parts(self.annotation)

    @property
    def flat(self) -> bool:
        """A free mapping whose values are no mappings themselves."""
        return self.free and any(
            get_origin(part) is dict and get_args(part)[1] is not Any for part in _spelled(self.annotation)
        )

    @property
    def number(self) -> str:
        """ "int" or "float" where the value is a number, else ""."""
        kinds = _parts(self.annotation) & {int, float}
        return kinds.pop().__name__ if kinds else ""

    @property
    def takes_list(self) -> bool:
        return list in _parts(self.annotation)

    @property
    def takes_null(self) -> bool:
        return type(None) in _parts(self.annotation)


@dataclass(frozen=True)
class Schema:
    """All keys of a section class, and the names of the sections between them ("actor", "actor.optim")."""

    keys: dict[str, Key]
    sections: frozenset[str]

    def section_of(self, name: str) -> str:
        """The deepest section that `name` lies in; "" when its first part is no section."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.sections:
                return name
        return ""

    def key_of(self, name: str) -> Key | None:
        """The key that `name` is, or that it lies in when that key is a free mapping."""
        if name in self.keys:
            return self.keys[name]
        while name:
            name = name.rpartition(".")[0]
            if name in self.keys:
                return self.keys[name] if self.keys[name].free else None
        return None

    def free(self, name: str) -> bool:
        """`name` is a mapping whose keys are the user's, or lies in one."""
        key = self.key_of(name)
        return key is not None and key.free

    def flat_prefix(self, name: str) -> str:
        """The free mapping that `name` lies in, with a dot, where its values are no mappings; else ""."""
        found = [key.name + "." for key in self.keys.values() if key.flat and name.startswith(key.name + ".")]
        return found[0] if found else ""

    def suggest(self, name: str) -> list[str]:
        """Keys that the writer of an unknown `name` may have meant, best first, at most three."""
        leaf, leaves = name.rpartition(".")[2], {key.leaf for key in self.keys.values()}
        near = [leaf] if leaf in leaves else []
        if not near and len(leaf) > 2:
            near = difflib.get_close_matches(leaf, sorted(leaves), n=2, cutoff=0.75)
        found = [key.name for key in self.keys.values() if key.leaf in near]
        found += difflib.get_close_matches(name, self.keys, n=3, cutoff=0.85)
        if "." not in name:
            found += difflib.get_close_matches(name, sorted(self.sections), n=1, cutoff=0.6)
        likeness = {key: difflib.SequenceMatcher(None, name, key).ratio() for key in found}
        ranked = sorted(likeness, key=lambda key: -likeness[key])
        # One that is near in every letter leaves no doubt; the others would only distract.
        return ranked[:1] if ranked and likeness[ranked[0]] > 0.9 else ranked[:3]


def _parts(annotation: Any) -> set[Any]:
    """The plain types in an annotation: {int, NoneType} of Annotated[int, ...] | None."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _parts(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return {part for argument in get_args(annotation) for part in _parts(argument)}
    return {origin or annotation}


def _spelled(annotation: Any) -> list[Any]:
    """The types in an annotation, with their own arguments: [dict[str, float], None] of dict[str, float] | None."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _spelled(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for argument in get_args(annotation) for part in _spelled(argument)]
    return [annotation]


def schema_of(cls: type[Any]) -> Schema:
    """Keys of the section class `cls` and of the sections in it, in the order of declaration."""
    keys: dict[str, Key] = {}
    sections: set[str] = set()
    _collect(cls, "", keys, sections)
    return Schema(keys, frozenset(sections))


def _collect(cls: type[Any], prefix: str, keys: dict[str, Key], sections: set[str]) -> None:
    infos: dict[str, Any] = cls.__pydantic_fields__
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        name, hint, info = prefix + field.name, hints[field.name], infos[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            sections.add(name)
            _collect(hint, name + ".", keys, sections)
            continue
        required = info.is_required()
        default = None if required else info.get_default(call_default_factory=True)
        assert default is not PydanticUndefined, name
        keys[name] = Key(name, hint, default, required, _doc(cls, field.name))


def _doc(cls: type[Any], field: str) -> str:
    # pydantic reads the text under a field from the class that declares it, and not again for a subclass.
    for base in cls.__mro__:
        info = getattr(base, "__pydantic_fields__", {}).get(field)
        if info is not None and info.description:
            return info.description
    return ""
