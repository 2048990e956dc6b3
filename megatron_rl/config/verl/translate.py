"""A verl config, from YAML or from dotted overrides, read as one of ours.

Each of its keys is mapped, accepted because it changes nothing here, or refused with the name of what it asks for:
nothing is dropped without a word. Our keys may stand beside verl's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from megatron_rl.config.text.reader import Entry
from megatron_rl.config.text.schema import Schema
from megatron_rl.config.verl import experts, keys, lora, neutral, rules, sft, training
from megatron_rl.config.verl.work import DEFAULT, Mapped, Translation, Work


def is_verl(entries: Iterable[Entry]) -> bool:
    """A key lies under actor_rollout_ref, a list of defaults names verl's own, or the keys are of its SFT trainer."""
    found = list(entries)
    names = [entry.key for entry in found]
    if any(name.partition(".")[0] == "actor_rollout_ref" for name in names) or sft.is_sft(names):
        return True
    return any(entry.key == "defaults" and rules.names_a_trainer(entry.value) for entry in found)


def translate(entries: Iterable[Entry], schema: Schema) -> Translation:
    """All entries in our keys. Where two sources set the same key the later wins, whichever name it uses."""
    latest: dict[str, Entry] = {}
    for entry in entries:
        latest.pop(entry.key, None)
        latest[entry.key] = entry
    order = {key: place for place, key in enumerate(latest)}
    trains_alone = sft.is_sft(list(latest))
    latest, names = sft.renamed(latest) if trains_alone else (latest, {})
    work = Work(latest, schema, names)
    chosen = sft.RULES if trains_alone else (*rules.RULES, *training.RULES, lora.lora, experts.experts)
    for combine in chosen:
        combine(work)
    for entry in list(latest.values()):
        if entry.key not in work.done:
            _one(work, entry)
    for verl_key, (key, value) in (sft.DEFAULTS if trains_alone else keys.DEFAULTS).items():
        if key not in work.placed:
            work.place(Entry(verl_key, value, "", -1), key, value, note=DEFAULT)
    mapped = [_told(one, work.placed[one.key]) for one in work.mapped]
    return Translation(
        list(work.placed.values()),
        tuple(sorted(mapped, key=lambda one: order.get(one.verl_key, len(order)))),
        tuple(work.accepted),
        tuple(work.differs),
        work.faults,
    )


def _told(mapped: Mapped, final: Entry) -> Mapped:
    """`mapped`, with a note where a later source set the key to something else."""
    if mapped.value == final.value:
        return mapped
    return replace(mapped, note=f"overruled: set to {final.value} {final.where}")


def _one(work: Work, entry: Entry) -> None:
    """Place, accept or refuse one key that no rule for several keys has taken."""
    key, value = entry.key, entry.value
    target = _target(key)
    if target is not None and (value == "???" or (value is None and not _takes_null(work.schema, key, target))):
        work.accept(key, "not given")
    elif key in keys.RENAMED:
        work.place(entry, keys.RENAMED[key], value)
    elif key in keys.SPECIAL:
        ours, written = keys.SPECIAL[key]
        special = [new for old, new in written.items() if old == value and not isinstance(value, bool)]
        work.place(entry, ours, special[0] if special else value)
    elif key in keys.CHOICES:
        _choice(work, key, value)
    elif (verdict := neutral.NEUTRAL.get(key)) is not None:
        _judge(work, key, verdict)
    elif (free := _free(key)) is not None:
        work.place(entry, free, value)
    elif work.schema.key_of(key) is not None or (key in work.schema.sections and value in (None, {})):
        work.place(entry, key, value, own=True)
    else:
        _without_counterpart(work, key, value)


def _target(key: str) -> str | None:
    """The key of ours that takes the value of a key of verl."""
    if key in keys.RENAMED:
        return keys.RENAMED[key]
    pair = keys.SPECIAL.get(key) or keys.CHOICES.get(key)
    return None if pair is None else pair[0]


def _takes_null(schema: Schema, key: str, ours: str) -> bool:
    if key in keys.SPECIAL and None in keys.SPECIAL[key][1]:
        return True
    known = schema.key_of(ours)
    assert known is not None, ours
    return known.takes_null


def _choice(work: Work, key: str, value: object) -> None:
    ours, choices = keys.CHOICES[key]
    if isinstance(value, str) and value in choices:
        work.place(work.latest[key], ours, choices[value])
    else:
        cure = f"choices: {', '.join(map(str, choices))}"
        work.refuse(key, f"asks for {value!r}, which is not offered here", cure)


def _judge(work: Work, key: str, verdict: neutral.Verdict) -> None:
    value = work.value(key)
    if not verdict.accepts(value):
        lacks = verdict.lacks or f"{value!r}"
        cure = verdict.cure or "remove it, or give the value that is verl's default"
        work.refuse(key, f"asks for {lacks}, which is not offered here", cure)
    else:
        work.accept(key, verdict.why)


def _free(key: str) -> str | None:
    for prefix, ours in keys.FREE.items():
        if key == prefix or key.startswith(prefix + "."):
            return ours + key.removeprefix(prefix)
    return None


def _without_counterpart(work: Work, key: str, value: object) -> None:
    """Accept or refuse a key that no table names by itself."""
    if key.endswith("._target_") or key == "_target_":
        work.accept(key, "a class name for Hydra")
        return
    strict = [prefix for prefix in neutral.STRICT if key.startswith(prefix)]
    if strict and value not in (None, {}):
        reason = f"asks for {neutral.STRICT[strict[0]]} that is not passed on here"
        work.refuse(key, reason, "remove it; what changes the model belongs into its config.json")
        return
    if strict or (value in (None, {}) and any(known.startswith(key + ".") for known in known_keys())):
        work.accept(key, "nothing in it")
        return
    prefixes = [prefix for prefix in neutral.GROUPS if key.startswith(prefix)]
    if prefixes and not _misspelled(key, max(prefixes, key=len)):
        _grouped(work, key, max(prefixes, key=len))
    else:
        work.refuse(key, *_unknown(work.schema, key))


def _grouped(work: Work, key: str, prefix: str) -> None:
    """A key of a section that is judged as a whole: where it is on, its switch is refused, and the rest with it."""
    group = neutral.GROUPS[prefix]
    on = [name for name in group.switches if work.value(prefix + name) not in group.off]
    if not on:
        work.accept(key, group.why)
    elif key == prefix + on[0] or on == [""]:
        if not any(group.lacks in fault.reason for fault in work.faults if fault.key.startswith(prefix)):
            work.refuse(key, f"asks for {group.lacks}, which is not offered here", "remove it, or turn it off")
        work.done.add(key)
    else:
        work.done.add(key)


def _misspelled(key: str, prefix: str) -> bool:
    """The key is nearly the switch of its section, and not it: `profiler.enabel`."""
    switches = neutral.GROUPS[prefix].switches
    leaf = key.removeprefix(prefix)
    return leaf not in switches and bool(difflib.get_close_matches(leaf, switches, n=1, cutoff=0.8))


@cache
def known_keys() -> tuple[str, ...]:
    """Every key of verl that the tables name by itself."""
    switches = [prefix + name for prefix, group in neutral.GROUPS.items() for name in group.switches if name]
    tables: tuple[Iterable[str], ...] = (
        keys.RENAMED, keys.SPECIAL, keys.CHOICES, keys.FREE,
        neutral.NEUTRAL, rules.KEYS, training.KEYS, lora.KEYS, experts.KEYS, switches,
    )  # fmt: skip
    return tuple(dict.fromkeys(key for table in tables for key in table))


def _unknown(schema: Schema, key: str) -> tuple[str, str]:
    """(reason, cure) of a key that is in no table."""
    close = difflib.get_close_matches(key, [*known_keys(), *schema.keys], n=2, cutoff=0.8)
    reason = "this key is neither verl's, as far as known here, nor ours"
    if close:
        return reason, f"did you mean {' or '.join(close)}?"
    return reason, "remove it, or set what you need with keys of this package"


class VerlNames:
    """Mappings with keys of the user's own, by our names and by verl's (schema.Names)."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def free(self, name: str) -> bool:
        """`name` is such a mapping, or lies in one."""
        return (
            self._schema.free(name)
            or _free(name) is not None
            or any(name.startswith(prefix) or name + "." == prefix for prefix in neutral.STRICT)
        )

    def flat_prefix(self, name: str) -> str:
        """The mapping that `name` lies in, with a dot, where its values are no mappings themselves; else ""."""
        return self._schema.flat_prefix(name)
