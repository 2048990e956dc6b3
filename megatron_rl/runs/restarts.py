"""Errors that new workers can cure: a run builds them again and goes on from its newest checkpoint.

trainer.max_restarts says how often. Every attempt has a fresh trainer, workers, reward processes and Ray; the process
and the claim to the folder stay. What would come again whatever is built is not tried again: configs, data,
checkpoints, numbers that are not finite, memory that does not suffice, errors of user code.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import ClusterError, DeviceError, NodeLost, P2PError, RankDied, RankHung

logger = logging.getLogger(__name__)

CURABLE = (RankDied, RankHung, NodeLost, DeviceError, P2PError)
"""A death, memory that the kernel or Ray took back, a hang, a node, a GPU, a connection between ranks."""
LONGEST_WAIT_S = 300.0


def can_cure(error: BaseException) -> bool:
    """Whether new workers may do without the error."""
    return isinstance(error, CURABLE)


def back_off_s(first_s: float, number: int) -> float:
    """Seconds before restart `number` (from 1): twice as long each time, up to LONGEST_WAIT_S."""
    return min(first_s * 2.0 ** (number - 1), LONGEST_WAIT_S)


class Restarts:
    """Counts the restarts of one run, waits before each, and says what became of it."""

    def __init__(
        self,
        cfg: TrainerConfig,
        say: Callable[[str], None],
        nodes_are_there: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """say: takes a line for a reader. nodes_are_there: waits for the nodes; ClusterError if they stay away."""
        self._cfg, self._say, self._nodes_are_there = cfg, say, nodes_are_there
        self._sleep, self._clock = sleep, clock
        self._last_step_at = clock()
        self._fault_at: float | None = None
        """When the error came that the attempt under way is to cure."""
        self._has_to_wait = False
        self.count = 0

    def take(self, error: Exception) -> None:
        """The attempt under way ended in the error: raises it if no restart can cure it, or none is left."""
        if not self._is_curable(error) or self._cfg.max_restarts == 0:
            raise error
        if self.count >= self._cfg.max_restarts:
            error.add_note(f"trainer.max_restarts: {self.count} restarts are used up")
            raise error
        self.count += 1
        self._fault_at, self._has_to_wait = self._clock(), True
        wait_s = back_off_s(self._cfg.restart_wait_s, self.count)
        head, *more = str(error).splitlines() or [""]
        self._say(
            f"restart {self.count} of {self._cfg.max_restarts} in {wait_s:g} s; the cause: "
            f"{type(error).__name__}: {head}"
        )
        for line in more:
            logger.warning("%s", line)

    def wait(self) -> None:
        """The back-off, then until the nodes are there; nothing if there was no fault since the last wait. Raises
        ClusterError if the nodes do not come: the run ends.
        """
        if not self._has_to_wait:
            return
        self._has_to_wait = False
        # What the attempt before has made was put out of the collector's reach (gc.freeze).
        gc.unfreeze()
        gc.collect()
        self._sleep(back_off_s(self._cfg.restart_wait_s, self.count))
        self._nodes_are_there()

    def step_done(self, step: int) -> None:
        """A step is complete. The first after a restart is said."""
        now = self._clock()
        if self._fault_at is not None:
            self._say(
                f"restart {self.count} of {self._cfg.max_restarts}: step {step} is complete, "
                f"{now - self._fault_at:.1f} s after the fault was named and {now - self._last_step_at:.1f} s after "
                "the last complete step"
            )
            self._fault_at = None
        self._last_step_at = now

    def _is_curable(self, error: Exception) -> bool:
        # Before the first step of a restart a node that is lost may still be counted, and its room be asked for.
        return can_cure(error) or (self._fault_at is not None and type(error) is ClusterError)
