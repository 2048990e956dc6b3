"""Which keys a check reads: found while it runs, so that no list of them is kept by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, TypeVar

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault
from megatron_rl.settings import Variant

T = TypeVar("T")


class UnreadableKey(Exception):
    """A check read a key whose own value is wrong already: what it would say is about a stand-in."""


class Recorder:
    """Views of a run's sections that note each key which is read through them.

    unreadable: keys that raise UnreadableKey when they are read.
    A view is an instance of a subclass of its section. Properties and methods run on the view itself, so that
    what they read is noted too; dataclasses.replace reads, and notes, every key of the section that it does not change.
    """

    def __init__(self, unreadable: Collection[str] = ()) -> None:
        self._unreadable = unreadable
        self.reads: set[str] = set()

    def view(self, section: T, prefix: str = "") -> T:
        """`section` with its keys noted. prefix: the section's name with a dot."""
        view = object.__new__(_view_class(type(section)))
        for name, value in (("_section", section), ("_prefix", prefix), ("_recorder", self)):
            object.__setattr__(view, name, value)
        return view

    def read(self, section: object, prefix: str, name: str) -> Any:
        """The value of a field of `section`: a view where that is a section itself.

        Whoever reads a record that a key chooses reads its type.
        """
        value = getattr(section, name)
        if isinstance(value, Variant):
            self._note(f"{prefix}{name}.type")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.view(value, f"{prefix}{name}.")
        self._note(prefix + name)
        return value

    def _note(self, key: str) -> None:
        self.reads.add(key)
        if key in self._unreadable:
            raise UnreadableKey(key)


@cache
def _view_class(section: type[Any]) -> type[Any]:
    fields = {field.name for field in dataclasses.fields(section)}

    def read(self: Any, name: str) -> Any:
        own = object.__getattribute__
        if name in fields:
            return own(self, "_recorder").read(own(self, "_section"), own(self, "_prefix"), name)
        # dataclasses.replace builds a plain section.
        return section if name == "__class__" else own(self, name)

    return type(section.__name__, (section,), {"__getattribute__": read})


def recorded(
    check: Callable[[RunConfig], list[Fault]], cfg: RunConfig, unreadable: Collection[str] = ()
) -> tuple[list[Fault], frozenset[str]]:
    """(faults of the check, keys that it read). It ends without a fault where it reads an unreadable key."""
    recorder = Recorder(unreadable)
    try:
        faults = check(recorder.view(cfg))
    except UnreadableKey:
        faults = []
    return faults, frozenset(recorder.reads)
