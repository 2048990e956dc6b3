"""Saves of a run's model in Hugging Face form: one at a time, written by the ranks while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class ModelStore(Protocol):
    """Writes a run's models (runs/trainer.py)."""

    def save(self, path: str, background: bool = False) -> None:
        """Have the ranks write a folder; background: from a copy, while the caller goes on. Else it is there after."""
        ...

    def models_done(self) -> bool:
        """Whether finish_models would return at once."""
        ...

    def finish_models(self) -> None:
        """Wait for the ranks; what was begun has its name then. Raises CheckpointError if one could not write."""
        ...


@dataclass(frozen=True)
class _UnderWay:
    path: Path
    began: float
    waited_s: float
    """Seconds that training waited for it."""


class ModelSaves:
    """Begins and finishes saves. A save that fails ends the run: its error is raised by the next call here."""

    def __init__(self, store: ModelStore, say: Callable[[str], None]) -> None:
        """say: takes a line for a reader."""
        self._store, self._say = store, say
        self._under_way: _UnderWay | None = None
        self.has_failed = False
        """A save could not be written: no checkpoint of its step may become whole."""
        self.longest_s = 0.0
        """Seconds of the slowest one, from its beginning to its name."""

    def begin(self, path: Path, background: bool) -> None:
        """Save the model at `path`; of a save before that is under way the end is waited for."""
        self.finish()
        start = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._store.save(str(path), background)
        self._under_way = _UnderWay(path, start, time.perf_counter() - start)
        if not background:
            self._said()

    def poll(self) -> bool:
        """Finish the save that is under way if the ranks have written it; whether none is under way now."""
        if self._under_way is not None and self._store.models_done():
            self.finish()
        return self._under_way is None

    def finish(self) -> None:
        """Wait for the save that is under way."""
        if self._under_way is None:
            return
        start = time.perf_counter()
        try:
            self._store.finish_models()
        except BaseException:
            self._under_way, self.has_failed = None, True
            raise
        self._said(time.perf_counter() - start)

    def _said(self, waited_s: float = 0.0) -> None:
        one, self._under_way = self._under_way, None
        assert one is not None
        seconds = time.perf_counter() - one.began
        self.longest_s = max(self.longest_s, seconds)
        self._say(f"saved {one.path} in {seconds:.1f} s; training waited {one.waited_s + waited_s:.1f} s")
