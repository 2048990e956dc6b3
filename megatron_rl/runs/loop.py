"""The synchronous loop, one step after the other: take, learn, publish."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias, TypeVar

from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.flow.run import During
from megatron_rl.runs.checkpoints import Checkpoint, StateStore
from megatron_rl.runs.model_saves import ModelStore
from megatron_rl.runs.state import RunState, Stateful
from megatron_rl.runs.trainer import StepResult
from megatron_rl.runs.validation import Validation

StepT = TypeVar("StepT")


class LoopTrainer(StateStore, ModelStore, Protocol[StepT]):
    """One algorithm with its data and workers (runs/trainer.py). StepT: a step under way."""

    @property
    def total_steps(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def start(self, checkpoint: Checkpoint | None) -> object:
        """checkpoint: what the models go on from. The parts of `stateful` have been restored by then."""
        ...

    def tell(self, during: During) -> None:
        """Enter `during` with the name of what a step is at."""
        ...

    def take(self, step: int) -> StepT: ...
    def learn(self, taken: StepT, /) -> StepT: ...
    def publish(self, learned: StepT, /) -> StepResult: ...
    def validate(self, step: int) -> Validation: ...
    def finished(self) -> bool:
        """Whether the run may end before total_steps."""
        ...

    def stateful(self) -> Mapping[str, Stateful]: ...
    def close(self) -> None: ...
    def summary(self) -> Sequence[str]:
        """What was read, for the run's first lines."""
        ...


OneStep: TypeAlias = Callable[[int], StepResult]
"""Does the step of this number."""
Loop: TypeAlias = Callable[[LoopTrainer[StepT], RolloutBuffer[StepT], RunState], AbstractContextManager[OneStep]]


@contextmanager
def synchronous(
    trainer: LoopTrainer[StepT], buffer: RolloutBuffer[StepT], state: RunState
) -> Generator[OneStep, None, None]:
    """Each step learns from what the newest weights have just sampled."""

    def one_step(step: int) -> StepResult:
        buffer.advance(state.step)
        number = buffer.reserve()
        assert number is not None, "the step before has taken what it put"
        buffer.put(number, state.step, trainer.take(step))
        taken = buffer.take()
        assert taken is not None, "it was made with the newest weights"
        return trainer.publish(trainer.learn(taken))

    yield one_step
