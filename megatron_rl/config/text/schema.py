"""The keys of a run, read from the section classes: what exists, what it means, what it is when not given."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Protocol, get_args, get_origin

from pydantic_core import PydanticUndefined

from megatron_rl.config.sections.base import Choice, OneOf
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
    default: object
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
class ChoiceKeys:
    """Keys of one Choice, which `name` is the key of: `name.type`, and the settings of each type."""

    name: str
    choice: Choice
    settings: dict[str, dict[str, Key]]
    """type -> name of a setting -> its key, name.setting"""
    short: dict[str, str]
    """key that means one of these -> that one: actor.tau_pos -> actor.loss.tau_pos"""

    @property
    def type_key(self) -> str:
        """The key of the type."""
        return f"{self.name}.type"

    def types_with(self, setting: str) -> list[str]:
        """Types that have this setting."""
        return [name for name, settings in self.settings.items() if setting in settings]


@dataclass(frozen=True)
class Schema:
    """All keys of a section class, and the names of the sections between them ("actor", "actor.optim").

    A key that only some types of a Choice have is in `keys` as the first of them has it.
    """

    keys: dict[str, Key]
    sections: frozenset[str]
    choices: dict[str, ChoiceKeys] = field(default_factory=dict[str, ChoiceKeys])
    """key of a Choice -> its keys"""

    @cached_property
    def short(self) -> dict[str, str]:
        """Key that is short for another -> that one; the key of a Choice is short for its type."""
        short = {name: keys.type_key for name, keys in self.choices.items()}
        return short | {key: full for keys in self.choices.values() for key, full in keys.short.items()}

    def section_of(self, name: str) -> str:
        """The deepest section that `name` lies in; "" when its first part is no section."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.sections:
                return name
        return ""

    def key_of(self, name: str) -> Key | None:
        """The key that `name` is or is short for, or that it lies in when that key is a free mapping."""
        name = self.short.get(name, name)
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


def _parts(annotation: object) -> set[Any]:
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
    schema = Schema({}, frozenset())
    sections: set[str] = set()
    _collect(cls, "", schema, sections)
    return replace(schema, sections=frozenset(sections))


def _collect(cls: type[Any], prefix: str, schema: Schema, sections: set[str]) -> None:
    infos: dict[str, Any] = cls.__pydantic_fields__
    hints = typing.get_type_hints(cls, include_extras=True)
    for one in dataclasses.fields(cls):
        name, hint, info = prefix + one.name, hints[one.name], infos[one.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            sections.add(name)
            _collect(hint, name + ".", schema, sections)
            continue
        choice = _choice_in(hint)
        if choice is not None:
            sections.add(name)
            _collect_choice(name, prefix, choice, _doc(cls, one.name), schema)
            continue
        required = info.is_required()
        default = None if required else info.get_default(call_default_factory=True)
        assert default is not PydanticUndefined, name
        schema.keys[name] = Key(name, hint, default, required, _doc(cls, one.name))


def _choice_in(annotation: Any) -> Choice | None:
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Choice)), None)


def _collect_choice(name: str, prefix: str, choice: Choice, doc: str, schema: Schema) -> None:
    settings: dict[str, dict[str, Key]] = {}
    for type_name, chosen in choice.classes.items():
        of_type = schema_of(chosen)
        assert not of_type.sections, f"{chosen}: a setting that is a section itself has no key here"
        settings[type_name] = {key.name: replace(key, name=f"{name}.{key.name}") for key in of_type.keys.values()}
    short = {prefix + key: f"{name}.{setting}" for key, setting in choice.short.items()}
    keys = ChoiceKeys(name, choice, settings, short)
    schema.choices[name] = keys
    names = Annotated[str, OneOf(tuple(choice.classes))]
    schema.keys[keys.type_key] = Key(keys.type_key, names, choice.default, False, doc)
    for of_type in settings.values():
        for setting, key in of_type.items():
            types = ", ".join(keys.types_with(setting))
            schema.keys.setdefault(key.name, replace(key, doc=f"{key.doc} ({types})"))


def _doc(cls: type[Any], field: str) -> str:
    # pydantic reads the text under a field from the class that declares it, and not again for a subclass.
    for base in cls.__mro__:
        info = vars(base).get("__pydantic_fields__", {}).get(field)
        if info is not None and info.description:
            return info.description
    return ""
