"""Where experience waits between the sampler and the learner, in bounded number and at a bounded age.

Versions count the updates of the weights. What was sampled with version v and is learned from at version w has the
staleness w - v. The buffer admits as much as can be learned from in time, and refuses what has become too old.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron_rl.errors import RolloutError

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class EntryKey:
    """In this order entries are learned from."""

    version: int
    """Of the oldest weights that made it."""
    number: int
    """Its place in the order of the prompts."""


class RolloutBuffer(Generic[T]):
    """Entries of experience, each for one update. `reserve` a place, `put` what was sampled, `take` what is next.

    None of the methods waits; runs/loop_async.py does. They may be called from several threads.

    Example, max_staleness 1: at version 0 two places can be reserved, 0 and 1; each new version admits one more.
    """

    def __init__(self, max_staleness: int, version: int = 0) -> None:
        """version: of the weights at the start. Raises ValueError if max_staleness is negative."""
        if max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness} -- give 0 (only the newest weights) or more")
        self.max_staleness = max_staleness
        self._first = self._version = version
        self._reserved: set[int] = set()
        self._entries: dict[EntryKey, T] = {}
        self._next = 0
        self._dropped = 0
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """The most entries that are under way or waiting."""
        return self.max_staleness + 1

    @property
    def num_dropped(self) -> int:
        """Entries that were refused because they had become too old, since the run began."""
        return self._dropped

    def __len__(self) -> int:
        """Entries that wait."""
        return len(self._entries)

    def advance(self, version: int) -> None:
        """The weights have this version now; what has become too old is dropped and counted.

        Raises RolloutError if the version would go back.
        """
        with self._lock:
            if version < self._version:
                raise RolloutError(f"the weights' version goes back from {self._version} to {version}")
            self._version = version
            self._drop_old()

    def reserve(self) -> int | None:
        """The number of the next entry, if it may be sampled now: then it can be learned from before it is too old.

        None if it has to wait for newer weights.
        """
        with self._lock:
            # One entry is learned from a version; each that was dropped is replaced.
            admitted = self._version - self._first + self.capacity + self._dropped
            if self._next >= admitted or len(self._reserved) + len(self._entries) >= self.capacity:
                return None
            number = self._next
            self._next += 1
            self._reserved.add(number)
            return number

    def put(self, number: int, version: int, item: T) -> bool:
        """What was sampled for a reserved number; version: of the oldest weights that made it.

        False if it is too old already; it is dropped and counted. Raises RolloutError if the number is not reserved, or
        the version is newer than the weights.
        """
        with self._lock:
            if number not in self._reserved:
                raise RolloutError(f"entry {number} has no place in the buffer -- reserve one first")
            if version > self._version:
                raise RolloutError(f"entry {number} has version {version}, but the weights have {self._version}")
            self._reserved.remove(number)
            self._entries[EntryKey(version, number)] = item
            self._drop_old()
            return EntryKey(version, number) in self._entries

    def take(self) -> T | None:
        """The entry that is next, by version and then by number; None if there is none yet."""
        with self._lock:
            return self._entries.pop(min(self._entries)) if self._entries else None

    def state(self) -> dict[str, Any]:
        """Everything: entries that wait, as [version, number, item]. What was only reserved has to be sampled again."""
        with self._lock:
            return {
                "first": self._first,
                "version": self._version,
                "next": min([self._next, *self._reserved]),
                "dropped": self._dropped,
                "entries": [[key.version, key.number, item] for key, item in sorted(self._entries.items())],
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, in a buffer with the same max_staleness or another one."""
        with self._lock:
            self._first, self._version = state["first"], state["version"]
            self._next, self._dropped = state["next"], state["dropped"]
            self._entries = {EntryKey(version, number): item for version, number, item in state["entries"]}
            self._reserved.clear()
            self._drop_old()

    def _drop_old(self) -> None:
        old = [key for key in self._entries if self._version - key.version > self.max_staleness]
        for key in old:
            del self._entries[key]
        self._dropped += len(old)
