"""The asynchronous loop: the same three verbs, with a producer that samples in a thread of its own.

How far the producer may be ahead is the buffer's to say. With staleness 0 it samples step k once step k - 1 is over, so
that every number is the synchronous loop's. More is not offered yet.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic

from megatron_rl.errors import ConfigError, Fault, RolloutError
from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.runs.loop import LoopTrainer, OneStep, StepT
from megatron_rl.runs.state import RunState
from megatron_rl.runs.trainer import StepResult


@contextmanager
def asynchronous(
    trainer: LoopTrainer[StepT], buffer: RolloutBuffer[StepT], state: RunState
) -> Generator[OneStep, None, None]:
    """Each step learns from what the producer has put into the buffer. Raises ConfigError for a staleness above 0."""
    if buffer.max_staleness > 0:
        reason = "learning from the samples of older weights is not offered yet"
        raise ConfigError([Fault("trainer.max_staleness", buffer.max_staleness, reason, "set it to 0")])
    producer = _Producer(trainer, buffer)

    def one_step(step: int) -> StepResult:
        producer.advance(state.step)
        return trainer.publish(trainer.learn(producer.take()))

    try:
        yield one_step
    finally:
        producer.close()


class _Producer(Generic[StepT]):
    """Samples whatever the buffer admits, until it is closed. An error in it is raised by `take`."""

    def __init__(self, trainer: LoopTrainer[StepT], buffer: RolloutBuffer[StepT]) -> None:
        self._trainer, self._buffer = trainer, buffer
        self._version: int | None = None
        """Of the weights; None until `advance` lets the first step begin."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="producer")
        self._end = self._pool.submit(self._run)
        self._end.add_done_callback(lambda _: self._notify())

    def advance(self, version: int) -> None:
        """The weights of this version are in the engines, and what belongs to the step before is over."""
        with self._changed:
            self._version = version
            self._buffer.advance(version)
            self._changed.notify_all()

    def take(self) -> StepT:
        """Wait for the next entry."""
        with self._changed:
            while True:
                taken = self._buffer.take()
                if taken is not None:
                    self._changed.notify_all()
                    return taken
                if self._end.done():
                    self._end.result()
                    raise RolloutError("the producer has ended, and the buffer is empty")
                self._changed.wait()

    def close(self) -> None:
        """Sample nothing more. What is being sampled is not waited for: the trainer's close ends it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while (place := self._reserved()) is not None:
            number, version = place
            item = self._trainer.take(number + 1)
            with self._changed:
                self._buffer.put(number, version, item)
                self._changed.notify_all()

    def _reserved(self) -> tuple[int, int] | None:
        """(number of the next entry, version of the weights) once there is a place for it; None to end.

        Entry 0 is of step 1.
        """
        with self._changed:
            while not self._is_closed:
                number = None if self._version is None else self._buffer.reserve()
                if number is not None and self._version is not None:
                    return (number, self._version) if number < self._trainer.total_steps else None
                self._changed.wait()
            return None
