"""One rank of a rollout engine: sampling, and taking new weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from megatron_rl.cluster.handles import hand_over
from megatron_rl.errors import RolloutError
from megatron_rl.observe.beat import unwatched
from megatron_rl.reshard.publisher import WeightPublisher
from megatron_rl.rollout.engine import Request, RolloutEngine, Sampling
from megatron_rl.types import EngineAnswer, Samples, SyncReport, Texts
from megatron_rl.workers.phases import RankMemory

_log = logging.getLogger(__name__)

Decode = Callable[[Samples, Sequence[int]], list[str]]


def no_texts(samples: Samples, stop_ids: Sequence[int]) -> list[str]:
    """For ranks whose answers nobody looks at."""
    return []


class TrainerWeights(Protocol):
    """The weights that are published, on a rank that trains as well."""

    @property
    def changed(self) -> bool:
        """They were updated since the last publish."""
        ...

    def prepare(self) -> None:
        """Have them on the device, checked. Raises NonFiniteError on all ranks if an engine must not get them."""
        ...

    def published(self) -> None:
        """The engines have them."""
        ...


class EngineWorker:
    """Methods are called on all ranks of an engine at once; `publish` on all ranks of all engines."""

    def __init__(
        self,
        engine: RolloutEngine,
        publisher: WeightPublisher,
        memory: RankMemory,
        decode: Decode,
        weights: TrainerWeights | None = None,
    ) -> None:
        """memory: what this process shares with other workers. decode: (samples, ids that end a response) -> the texts
        that rewards read. weights: None on ranks that only generate.
        """
        self._engine, self._publisher, self._memory, self._weights = engine, publisher, memory, weights
        self._decode = decode
        self._version = 0
        memory.add_engine(engine)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> EngineAnswer:
        """Samples of this engine's requests. Tokens and texts stay here, behind handles.

        An engine that a model pass has put to sleep is woken first.
        """
        self._refuse_stale()
        if not self._memory.engine_awake:
            self.wake()
        self._memory.enter("generate")
        with self._watched():
            samples = self._engine.generate(requests, sampling)
        texts = Texts.of(self._decode(samples, sampling.stop_token_ids))
        return EngineAnswer.of(samples, hand_over(samples), hand_over(texts))

    def _watched(self) -> AbstractContextManager[None]:
        """Our own engines say at each step that they go on; someone else's need not."""
        is_ours = type(self._engine).__module__.startswith("megatron_rl.")
        return nullcontext() if is_ours else unwatched(f"generate of {type(self._engine).__name__}")

    def publish(self, version: int, expect_change: bool) -> SyncReport:
        """The trained weights into every engine, under `version`; what this rank did.

        expect_change: an update has changed the weights since the last publish. Weights that are not finite, or that
        the engine's precision cannot hold, reach no engine: NonFiniteError on all ranks.
        """
        self._memory.enter("publish", "actor")
        if self._weights is not None and (expect_change or version == 0):
            self._weights.prepare()
        report = self._publisher.publish(version, expect_change=expect_change)
        self._version, self._memory.engine_awake = version, True
        if self._weights is not None:
            self._weights.published()
        return report

    def sleep(self) -> None:
        """Give the engine's memory up until `wake` or a publish."""
        self._engine.sleep()
        self._memory.engine_awake = False

    def wake(self) -> None:
        """Wake the engine with the weights that it had. Its own copies were given up, so they are published again: a
        collective over all ranks. RolloutError if those weights are gone, since the trainer has updated them.
        """
        self._refuse_stale()
        if not self._memory.engine_awake:
            _log.info("the engine wakes outside its turn: weights of version %d are published again", self._version)
            self.publish(self._version, expect_change=False)

    def _refuse_stale(self) -> None:
        # Version 0 is about to be published: the engine itself refuses to sample before.
        if self._weights is not None and self._weights.changed and self._engine.weight_version >= 0:
            raise RolloutError(
                f"generate between an update and its publish: the engine has weights of version {self._version}, and "
                "the trainer has newer ones in the same memory -- sample before the node `update`, or after `publish`"
            )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
