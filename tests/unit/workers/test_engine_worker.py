"""An engine on a rank that trains: late sampling wakes it, stale sampling is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_rl.errors import NonFiniteError, RolloutError
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling
from megatron_rl.rollout.fake import FakeEngine
from megatron_rl.types import Samples, SyncReport
from megatron_rl.workers.engine import EngineWorker, no_texts
from megatron_rl.workers.phases import RankMemory

SAMPLING = Sampling(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())
REQUESTS = [Request((1, 2), 7)]


class SleepingEngine(FakeEngine):
    """Refuses to sample asleep, as vLLM on a GPU does; only an update wakes it."""

    asleep = False

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        assert not self.asleep, "generate on a sleeping engine"
        return super().generate(requests, sampling)


class Publisher:
    """Takes whole updates and remembers them."""

    def __init__(self, engine: SleepingEngine) -> None:
        self.engine, self.calls = engine, list[tuple[int, bool]]()

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        self.calls.append((version, expect_change))
        self.engine.update_weights([], version)
        self.engine.wake()
        return SyncReport(messages=3)


class Trainer:
    """The trainer's weights: changed by an update, checked before a publish."""

    def __init__(self) -> None:
        self.changed, self.finite, self.checks = True, True, 0

    def prepare(self) -> None:
        self.checks += 1
        if not self.finite:
            raise NonFiniteError("the actor's weights")

    def published(self) -> None:
        self.changed = False


def rank(**trainer: Any) -> tuple[EngineWorker, SleepingEngine, Publisher, Trainer, RankMemory]:
    settings = EngineSettings(
        name="fake",
        model_path="",
        tokenizer_path="",
        vocab_size=16,
        max_model_len=8,
        dtype="float32",
        device="cpu",
        gpu_memory_utilization=0.5,
        kv_cache_gb=None,
        max_num_seqs=4,
        max_num_batched_tokens=None,
        enforce_eager=False,
        free_cache_engine=True,
        seed=0,
        needs_text=False,
    )
    engine, weights, memory = SleepingEngine(settings), Trainer(), RankMemory()
    publisher = Publisher(engine)
    return EngineWorker(engine, publisher, memory, no_texts, weights), engine, publisher, weights, memory


def test_sampling_after_a_model_pass_wakes_the_engine_with_the_weights_it_had():
    worker, engine, publisher, _, memory = rank()
    worker.publish(0, expect_change=False)
    first = worker.generate(REQUESTS, SAMPLING)
    memory.enter("forward", "actor")
    assert engine.asleep
    again = worker.generate(REQUESTS, SAMPLING)
    assert again.samples.fetch().token_ids.tolist() == first.samples.fetch().token_ids.tolist()
    assert publisher.calls == [(0, False), (0, False)]
    worker.generate(REQUESTS, SAMPLING)
    assert len(publisher.calls) == 2, "awake, it needs no publish"


@pytest.mark.parametrize("asleep", [True, False])
def test_sampling_between_an_update_and_its_publish_is_refused(asleep: bool):
    """Also by an engine that does not sleep: it would answer with weights of no version, or of the one before."""
    worker, _, publisher, weights, memory = rank()
    worker.publish(0, expect_change=False)
    weights.changed = True
    if asleep:
        memory.enter("update", "actor")
    for call in (lambda: worker.generate(REQUESTS, SAMPLING), worker.wake):
        with pytest.raises(RolloutError, match=r"has weights of version 0.* before the node `update`, or after"):
            call()
    worker.publish(1, expect_change=True)
    assert worker.generate(REQUESTS, SAMPLING).newest_version.tolist() == [1, 1]
    assert publisher.calls == [(0, False), (1, True)]


def test_weights_are_checked_when_they_are_new_and_bad_ones_reach_no_engine():
    worker, engine, publisher, weights, _ = rank()
    worker.publish(0, expect_change=False)
    worker.publish(1, expect_change=False)
    assert weights.checks == 1, "version 0, and every change"
    weights.finite = False
    with pytest.raises(NonFiniteError):
        worker.publish(2, expect_change=True)
    assert (len(publisher.calls), engine.weight_version) == (2, 1)


def test_sleep_and_wake_by_hand():
    worker, engine, publisher, _, _ = rank()
    worker.publish(3, expect_change=False)
    worker.sleep()
    assert engine.asleep
    worker.wake()
    worker.wake()
    assert not engine.asleep and publisher.calls == [(3, False), (3, False)]


def test_before_the_first_publish_the_engine_itself_refuses():
    worker, *_ = rank()
    with pytest.raises(RolloutError, match="before the first update of weights"):
        worker.generate(REQUESTS, SAMPLING)


def test_an_engine_on_ranks_of_its_own_knows_no_trainer():
    _, engine, publisher, _, memory = rank()
    worker = EngineWorker(engine, publisher, memory, no_texts)
    assert worker.publish(0, expect_change=False) == SyncReport(messages=3)
    assert worker.generate(REQUESTS, SAMPLING).lens.shape == (2,)
