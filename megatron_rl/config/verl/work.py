"""The translation of a verl config under way: what became of each key, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.text.reader import Entry, NoEffect
from megatron_rl.config.text.schema import Schema
from megatron_rl.errors import Fault

DEFAULT = "verl's default"


@dataclass(frozen=True)
class Mapped:
    """verl's key, and what it became. note: why, where the config does not hold the key itself, or not this value."""

    verl_key: str
    key: str
    value: object
    note: str = ""

    def __str__(self) -> str:
        return f"{self.verl_key} -> {self.key} = {self.value}" + (f"  ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Translation:
    """A verl config in our keys. differs: what the config means in verl, and is otherwise here."""

    entries: list[Entry]
    mapped: tuple[Mapped, ...]
    accepted: tuple[NoEffect, ...]
    differs: tuple[NoEffect, ...]
    faults: list[Fault]


@dataclass
class Work:
    """placed: our key -> its entry; its source decides between two that set it.

    names: key of verl's RL trainer -> the key that the config has for it, where that is another (verl's SFT).
    """

    latest: dict[str, Entry]
    schema: Schema
    names: dict[str, str] = field(default_factory=dict[str, str])
    placed: dict[str, Entry] = field(default_factory=dict[str, Entry])
    mapped: list[Mapped] = field(default_factory=list[Mapped])
    accepted: list[NoEffect] = field(default_factory=list[NoEffect])
    differs: list[NoEffect] = field(default_factory=list[NoEffect])
    faults: list[Fault] = field(default_factory=list[Fault])
    done: set[str] = field(default_factory=set[str])

    def name(self, verl_key: str) -> str:
        """The key as the config has it."""
        return self.names.get(verl_key, verl_key)

    def value(self, verl_key: str, default: object = None) -> Any:
        """What the config holds for a key of verl."""
        entry = self.latest.get(verl_key)
        return default if entry is None else entry.value

    def waits(self, verl_key: str) -> bool:
        """The config has the key, and nothing has been done about it yet."""
        return verl_key in self.latest and verl_key not in self.done

    def entry(self, verl_key: str, default: object = None) -> Entry:
        """The config's entry of a key; one that stands for verl's default where the config is silent."""
        return self.latest.get(verl_key, Entry(verl_key, default, "", -1))

    def place(self, entry: Entry, key: str, value: object, *, own: bool = False, note: str = "") -> None:
        """Set our `key`; of two verl keys that mean it, the one of the later source counts."""
        self.done.add(entry.key)
        other = self.placed.get(key)
        if other is not None and other.source == entry.source and other.value != value:
            reason = f"{key} is set to {other.value!r} {other.where}, and this key means the same"
            self.faults.append(Fault(self.name(entry.key), value, reason, "keep one of the two"))
        if not own:
            self.mapped.append(Mapped(self.name(entry.key), key, value, note))
        if other is not None and other.source > entry.source:
            return
        where = entry.where if entry.key == key else f"by {self.name(entry.key)} {entry.where}"
        where = f"by {DEFAULT} of {entry.key}" if entry.source < 0 else where
        self.placed[key] = Entry(key, value, where, entry.source)

    def accept(self, verl_key: str, why: str) -> None:
        """Note that a key changes nothing."""
        self.done.add(verl_key)
        self.accepted.append(NoEffect(self.name(verl_key), self.latest[verl_key].value, why))

    def differ(self, verl_key: str, what: str, value: object = None) -> None:
        """Note that what a key means in verl is otherwise here. value: verl's default, where the config is silent."""
        self.done.add(verl_key)
        self.differs.append(NoEffect(self.name(verl_key), self.value(verl_key, value), what))

    def refuse(self, verl_key: str, reason: str, cure: str) -> None:
        """Note that a key cannot be honoured."""
        self.done.add(verl_key)
        entry = self.latest[verl_key]
        self.faults.append(Fault(self.name(verl_key), entry.value, f"{reason} [set {entry.where}]", cure))
