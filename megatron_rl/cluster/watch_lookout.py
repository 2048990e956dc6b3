"""Whether the ranks of a call still go on, as far as the controller can see. Pure: Signs and times are handed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.cluster.watch import Sign, period_s

ReadSigns = Callable[[Sequence[int]], Mapping[int, Sign]]
"""(ranks) -> the newest Sign of each that has one of this call."""


@dataclass(frozen=True)
class _Seen:
    tick: int
    at: float


class Lookout:
    """Looks at the ranks of one call. A rank hangs if it says so itself, or if its Signs stand still.

    One rank that goes on is enough for the call to go on: the others may wait for it.
    """

    def __init__(self, read: ReadSigns, quiet_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """quiet_s: cluster.hang_timeout_s; infinite to look at nothing."""
        self._read, self._quiet_s, self._clock = read, quiet_s, clock
        # The first look is early, so that Signs that stand still are known by the end of quiet_s.
        self._next = clock() + quiet_s / 2
        self._seen: dict[int, _Seen] = {}
        self.signs: dict[int, Sign] = {}
        """What was read last."""
        self.silent: list[int] = []
        """Ranks whose Signs stand still, or that have given none."""

    def hangs(self, pending: Sequence[int]) -> bool:
        """Whether all pending ranks hang. Signs are read once a period, and not in the first half of quiet_s."""
        now = self._clock()
        if not pending or now < self._next:
            return False
        self._next = now + period_s(self._quiet_s)
        self.signs = dict(self._read(pending))
        for rank in pending:
            sign = self.signs.get(rank)
            tick = -1 if sign is None else sign.tick
            if rank not in self._seen or self._seen[rank].tick != tick:
                self._seen[rank] = _Seen(tick, now)
        self.silent = [rank for rank in pending if now - self._seen[rank].at >= self._quiet_s / 2]
        return all(rank in self.silent or self._says_so(rank) for rank in pending)

    def _says_so(self, rank: int) -> bool:
        sign = self.signs.get(rank)
        return sign is not None and sign.age_s >= self._quiet_s
