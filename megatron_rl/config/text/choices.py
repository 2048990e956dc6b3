"""Settings of records that a key chooses by their type (sections/base.py, Choice): from what was written to one form.

`actor.loss: sapo`, `actor.loss: {type: sapo, tau_pos: 2.0}` and verl's flat `actor.loss_mode`, `actor.tau_pos` all
become entries `actor.loss.type`, `actor.loss.tau_pos`. A setting of another type is refused; written flat, where
verl's scripts give settings of every loss, it has no effect and is told.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from megatron_rl.config.text.explain import bad_value, refused_choice, refused_value
from megatron_rl.config.text.reader import Entry, NoEffect
from megatron_rl.config.text.schema import ChoiceKeys, Schema
from megatron_rl.errors import Fault


@dataclass
class Settled:
    """Entries whose keys the schema has; settings without effect; faults with the place that set the key."""

    entries: list[Entry] = field(default_factory=list[Entry])
    unused: list[NoEffect] = field(default_factory=list[NoEffect])
    faults: list[Fault] = field(default_factory=list[Fault])
    unreadable: set[str] = field(default_factory=set[str])
    """keys whose entries were refused"""
    written: dict[str, str] = field(default_factory=dict[str, str])
    """key -> the shorter one that it was written by"""

    def as_written(self, fault: Fault) -> Fault:
        """The fault with the key that the reader wrote."""
        return replace(fault, key=self.written.get(fault.key, fault.key))


def settle(entries: Iterable[Entry], schema: Schema) -> Settled:
    """All entries, with those of each Choice in one form. entries: later ones win over earlier ones of their key."""
    settled = Settled(list(entries))
    for keys in schema.choices.values():
        _settle_one(keys, schema, settled)
    return settled


def _settle_one(keys: ChoiceKeys, schema: Schema, settled: Settled) -> None:
    own: dict[str, Entry] = {}
    flat: dict[str, Entry] = {}
    others: list[Entry] = []
    for entry in settled.entries:
        if entry.key == keys.name and entry.value not in (None, {}):
            # A name in place of a mapping replaces it, as a value replaces a value.
            own = {keys.type_key: replace(entry, key=keys.type_key)}
            settled.written[keys.type_key] = keys.name
        elif entry.key.startswith(keys.name + "."):
            own[entry.key] = entry
        elif entry.key in keys.short:
            flat[entry.key] = entry
        elif entry.key != keys.name:
            others.append(entry)
    settled.entries = others
    for key, entry in flat.items():
        full = keys.short[key]
        if full not in own:
            own[full] = replace(entry, key=full)
            settled.written[full] = key
        elif own[full].value != entry.value:
            other = own[full]
            reason = f"[set {entry.where}] is the same setting as {full}, which is {other.value} [set {other.where}]"
            settled.faults.append(Fault(key, entry.value, reason, "keep one of the two"))
    _take(keys, own, schema, settled)


def _take(keys: ChoiceKeys, own: dict[str, Entry], schema: Schema, settled: Settled) -> None:
    """Take over the settings of the chosen type."""
    given = own.pop(keys.type_key, None)
    chosen = keys.choice.default if given is None else given.value
    if not isinstance(chosen, str) or chosen not in keys.settings:
        assert given is not None
        fault = refused_choice(schema.keys[keys.type_key], keys.type_key, chosen)
        settled.faults.append(_placed(fault, given))
        settled.unreadable.add(keys.type_key)
        return
    settled.entries += [] if given is None else [given]
    for full, entry in own.items():
        setting = full.removeprefix(keys.name + ".")
        if setting in keys.settings[chosen]:
            settled.entries.append(entry)
        elif full in settled.written:
            _without_effect(keys, chosen, entry, schema, settled)
        else:
            settled.faults.append(_placed(_foreign_setting(keys, chosen, setting, entry), entry))


def _foreign_setting(keys: ChoiceKeys, chosen: str, setting: str, entry: Entry) -> Fault:
    types, known = keys.types_with(setting), list(keys.settings[chosen])
    if types:
        reason = f"is a setting of {', '.join(types)}, and {keys.type_key} is {chosen}"
        return Fault(entry.key, entry.value, reason, f"remove it, or set {keys.type_key}={types[0]}")
    near = difflib.get_close_matches(setting, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return Fault(
        entry.key, entry.value, f"{chosen} has no such setting", f"{hint}its settings: {', '.join(known) or 'none'}"
    )


def _without_effect(keys: ChoiceKeys, chosen: str, entry: Entry, schema: Schema, settled: Settled) -> None:
    """Note a flat setting of other types; its value must be one that they take."""
    setting = entry.key.removeprefix(keys.name + ".")
    types = keys.types_with(setting)
    key = keys.settings[types[0]][setting]
    faults = [fault for fault in [bad_value(key, entry.value)] if fault]
    try:
        keys.choice.classes[types[0]](**{setting: entry.value})
    except ValidationError as error:
        place = (*keys.name.split("."), types[0])
        faults += [refused_value(schema, {**one, "loc": (*place, *one["loc"])})[1] for one in error.errors()]
    if faults:
        settled.faults.append(_placed(faults[0], entry))
    elif entry.value != key.default:
        why = f"a setting of {', '.join(types)}, and {keys.type_key} is {chosen}"
        settled.unused.append(NoEffect(settled.written[entry.key], entry.value, why))


def _placed(fault: Fault, entry: Entry) -> Fault:
    return replace(fault, reason=f"{fault.reason} [set {entry.where}]")
