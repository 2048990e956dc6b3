"""From YAML files and dotted key=value texts to a RunConfig, or to one ConfigError that lists every fault.

Files are merged from left to right (mappings merge, lists and values replace), then come the overrides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_rl.config import verl
from megatron_rl.config.checks.table import Verb, cross_faults
from megatron_rl.config.run import RunConfig
from megatron_rl.config.text import interpolation
from megatron_rl.config.text.choices import settle
from megatron_rl.config.text.explain import MISSING, bad_value, refused_value, unknown_key
from megatron_rl.config.text.foreign import foreign_config
from megatron_rl.config.text.reader import Entry, NoEffect, read_file, read_overrides, resolve_numbers
from megatron_rl.config.text.schema import Key, Schema, join_key, schema_of, split_key
from megatron_rl.errors import ConfigError, Fault


@dataclass(frozen=True)
class Resolved:
    """A config, and how verl's keys became its keys (empty when the sources use ours)."""

    config: RunConfig
    mapped: tuple[verl.Mapped, ...]
    accepted: tuple[NoEffect, ...]
    differs: tuple[NoEffect, ...] = ()
    """What the config means in verl, and is otherwise here."""
    unused: tuple[NoEffect, ...] = ()
    """Settings of losses and estimators that were not chosen, written in the flat way of verl."""


@cache
def run_schema() -> Schema:
    """All keys of a run."""
    return schema_of(RunConfig)


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def load_config(paths: Sequence[str], overrides: Sequence[str] = ()) -> RunConfig:
    """The run that YAML files and `key=value` overrides describe. Raises ConfigError with all faults."""
    return resolve(paths, overrides).config


def resolve(paths: Sequence[str], overrides: Sequence[str] = (), verb: Verb = "train") -> Resolved:
    """As load_config, and tells how verl's keys were mapped. verb: what the config must be complete for."""
    schema = run_schema()
    entries, faults, complete = _read(paths, overrides, schema)
    unreadable = {fault.key for fault in faults} & schema.keys.keys()
    foreign = foreign_config(entries)
    if foreign is not None:
        raise ConfigError([foreign])
    mapped: tuple[verl.Mapped, ...] = ()
    accepted: tuple[NoEffect, ...] = ()
    differs: tuple[NoEffect, ...] = ()
    if verl.is_verl(entries):
        entries, unresolved = interpolation.resolve_all(entries)
        faults += unresolved
        if not entries:
            raise ConfigError(faults)
        translation = verl.translate(entries, schema)
        entries, mapped, accepted = translation.entries, translation.mapped, translation.accepted
        differs = translation.differs
        faults += translation.faults
    settled = settle(entries, schema)
    faults += settled.faults
    unreadable |= settled.unreadable
    known: dict[str, Entry] = {}
    for entry in _known(settled.entries, schema, faults):
        known.pop(entry.key, None)
        known[entry.key] = entry
    for entry in list(known.values()):
        key = schema.key_of(entry.key)
        assert key is not None, entry
        fault = bad_value(key, entry.value)
        if fault:
            faults.append(_placed(fault, known))
            unreadable.add(key.name)
            del known[entry.key]
    config, refused = _build(known, schema, unreadable)
    order = list(schema.keys)
    refused.sort(key=lambda fault: order.index(fault.key.partition("[")[0]))
    faults += [_placed(fault, known) for fault in refused if complete or fault.reason != MISSING]
    if complete:
        faults += [_placed(fault, known) for fault in cross_faults(config, frozenset(unreadable), verb)]
    if faults:
        raise ConfigError([settled.as_written(fault) for fault in faults])
    return Resolved(config, mapped, accepted, differs, tuple(settled.unused))


def _read(paths: Sequence[str], overrides: Sequence[str], schema: Schema) -> tuple[list[Entry], list[Fault], bool]:
    """Entries, faults, and whether each file could be read: one that could not may set any key."""
    complete = True
    names = verl.VerlNames(schema)
    entries: list[Entry] = []
    faults: list[Fault] = []
    for number, path in enumerate(paths):
        if _is_bare_key(path, schema):
            cure = f"write key=value, for instance {path}=..."
            faults.append(Fault(path, None, "is no file, and a setting needs a value", cure))
            continue
        found, wrong = read_file(path, number, names)
        entries += found
        faults += wrong
        complete &= bool(found) or not wrong
    removals = [text for text in overrides if text.startswith("~")]
    found, wrong = read_overrides([text for text in overrides if text not in removals], len(paths), names)
    kept, unknown = _without(entries + found, removals, schema)
    return kept, faults + wrong + unknown, complete


def _without(entries: list[Entry], removals: list[str], schema: Schema) -> tuple[list[Entry], list[Fault]]:
    """Entries that Hydra's `~key` does not take away; a default holds in place of those that it does."""
    faults: list[Fault] = []
    for text in removals:
        key = text[1:].partition("=")[0].strip()
        kept = [entry for entry in entries if entry.key != key and not entry.key.startswith(key + ".")]
        known = [*schema.keys, *schema.sections, *schema.short, *(verl.known_keys() if verl.is_verl(entries) else ())]
        if len(kept) == len(entries) and not any(name == key or name.startswith(key + ".") for name in known):
            reason = "takes away a key that no file sets, and that does not exist"
            faults.append(Fault(text, None, reason, "remove it, or correct the key"))
        entries = kept
    return entries, faults


def _is_bare_key(text: str, schema: Schema) -> bool:
    """`text` stands where a file belongs and is a key that lacks its value."""
    if Path(text).exists() or "/" in text or text.endswith((".yaml", ".yml")):
        return False
    return bool(schema.section_of(text.lstrip("+") + "."))


def _known(entries: list[Entry], schema: Schema, faults: list[Fault]) -> list[Entry]:
    """Entries of keys that exist; the others become faults. A section with nothing in it says nothing."""
    kept: list[Entry] = []
    for entry in entries:
        if entry.key in schema.sections and (entry.value is None or entry.value == {}):
            continue
        if schema.key_of(entry.key) is None:
            faults.append(_placed(unknown_key(schema, entry.key, entry.value), {entry.key: entry}))
        else:
            kept.append(entry)
    return kept


def _placed(fault: Fault, entries: dict[str, Entry]) -> Fault:
    """The fault with the place that set its key, where one did."""
    name, _, inner = fault.key.partition("[")
    entry = entries.get(name) or entries.get(run_schema().short.get(name, ""))
    if entry is None and inner:
        # Below the user's own mapping each name is an entry of its own.
        below = f"{name}.{join_key([inner.split(']')[0]])}"
        entry = next((one for key, one in entries.items() if key == below or key.startswith(below + ".")), None)
    return fault if entry is None else dataclasses.replace(fault, reason=f"{fault.reason} [set {entry.where}]")


def _build(known: dict[str, Entry], schema: Schema, unreadable: set[str]) -> tuple[RunConfig, list[Fault]]:
    """The config, and faults of values that do not fit; their keys join `unreadable` and hold stand-ins."""
    tree = _nested(known.values(), schema)
    faults: list[Fault] = []
    while True:
        try:
            return _adapter().validate_python(tree), faults
        except ValidationError as error:
            for one in error.errors(include_url=False):
                name, fault = refused_value(schema, cast("dict[str, object]", one))
                if name not in unreadable:
                    faults.append(fault)
                unreadable.add(name)
                _replace(tree, name, schema)


def _replace(tree: dict[str, object], name: str, schema: Schema) -> None:
    """Put the default of a key in its place; for a required key, something of its type."""
    *sections, leaf = name.split(".")
    node, key = _node(tree, sections), schema.keys[name]
    node.pop(leaf, None)
    if key.required:
        node[leaf] = [] if key.takes_list else ""


def _nested(entries: Iterable[Entry], schema: Schema) -> dict[str, object]:
    """Entries as a tree with every section present, so that each error of pydantic names a key."""
    tree: dict[str, object] = {}
    for name in sorted(schema.sections):
        _node(tree, name.split("."))
    for entry in entries:
        *above, leaf = split_key(entry.key)
        node = _node(tree, above)
        if not (entry.value == {} and isinstance(node.get(leaf), dict)):
            node[leaf] = entry.value
    return tree


def _node(tree: dict[str, object], parts: list[str]) -> dict[str, object]:
    """The mapping at `parts`; mappings that are missing are made."""
    node = tree
    for part in parts:
        inner = node.get(part)
        # A mapping laid over a single value replaces it.
        if type(inner) is not dict:
            node[part] = inner = {}
        node = cast("dict[str, object]", inner)
    return node


def to_dict(cfg: RunConfig) -> dict[str, object]:
    """The run as nested dicts, lists and scalars: what a YAML file would hold."""
    tree = dataclasses.asdict(cast(Any, cfg))
    for name, keys in run_schema().choices.items():
        record: Any = cfg
        for part in name.split("."):
            record = getattr(record, part)
        *above, leaf = name.split(".")
        node = _node(tree, above)
        node[leaf] = {"type": keys.choice.type_of(record), **cast("dict[str, object]", node[leaf])}
    return tree


def settings_of(cfg: RunConfig) -> Iterator[tuple[Key, object]]:
    """(key, value) of everything that the run is told; of a loss or an estimator only what the chosen one has."""
    schema, tree = run_schema(), to_dict(cfg)
    for key in schema.keys.values():
        choice = schema.choices.get(key.name.rpartition(".")[0])
        if choice is None or key.name == choice.type_key:
            yield key, value_of(tree, key.name)
            continue
        chosen = choice.settings[str(value_of(tree, choice.type_key))]
        if key.leaf in chosen:
            yield chosen[key.leaf], value_of(tree, key.name)


def dump_yaml(cfg: RunConfig, *, only_changed: bool = False) -> str:
    """The run as YAML that load_config reads back. only_changed: leave out what equals its default."""
    tree = to_dict(cfg)
    if only_changed:
        changed: dict[str, object] = {}
        for key, value in settings_of(cfg):
            *above, leaf = key.name.split(".")
            if key.required or value != key.default:
                _node(changed, above)[leaf] = value
        tree = changed
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=1_000_000)


class _Dumper(yaml.SafeDumper):
    """Mappings over several lines, lists in one."""


def _flat_list(dumper: Any, items: list[Any]) -> Any:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(list, _flat_list)
resolve_numbers(_Dumper)


def value_of(tree: dict[str, object], name: str) -> Any:
    """The value of a dotted key in what to_dict returned."""
    node: Any = tree
    for part in name.split("."):
        node = node[part]
    return node
