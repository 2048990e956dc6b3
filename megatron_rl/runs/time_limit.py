"""trainer.max_time: whether another step and a save still fit into it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.durations import seconds_of

FIRST_SAVE_S = 60.0
"""What a save is taken to need before one was measured; a tenth of the limit, if that is less."""
MARGIN = 1.5
"""A save may take so much longer than the longest before it."""


def process_age_s() -> float:
    """Seconds since this process began: imports and the start of workers count."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class TimeLimit:
    """Measures steps and saves, and says when to stop.

    Example, limit 3600 s, longest step 60 s, longest checkpoint 100 s: over from second 3390 on.
    """

    def __init__(self, text: str | None, age_s: Callable[[], float] = process_age_s) -> None:
        """text: as trainer.max_time has it; None if there is no limit."""
        self._limit_s = None if text is None else seconds_of(text)
        self._age_s = age_s
        self._longest_step_s = 0.0
        self._longest_save_s: dict[str, float] = {}

    def note_step(self, seconds: float) -> None:
        """A step, with what is around it."""
        self._longest_step_s = max(self._longest_step_s, seconds)

    def note_save(self, kind: str, seconds: float) -> None:
        """kind: a checkpoint, or a model in Hugging Face form. Both are written at the end."""
        self._longest_save_s[kind] = max(self._longest_save_s.get(kind, 0.0), seconds)

    @property
    def room_s(self) -> float:
        """What is left free at the end, for the saves."""
        if not self._longest_save_s:
            return min(FIRST_SAVE_S, (self._limit_s or 0.0) / 10)
        return MARGIN * sum(self._longest_save_s.values())

    def is_over(self) -> bool:
        """Whether one more step as long as the longest, and a save after it, would pass the limit."""
        if self._limit_s is None:
            return False
        return self._age_s() + self._longest_step_s + self.room_s >= self._limit_s
