"""From prompts to rollout groups: the engines' side of a run. New weights reach the engines here too."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.run import RunConfig
from megatron_rl.data.render import Renderer
from megatron_rl.errors import FlowError
from megatron_rl.rollout.engine import Request, Sampling, check_stop_texts
from megatron_rl.types import Prompt, Rollouts, SyncReport
from megatron_rl.workers.engine import EngineWorker
from megatron_rl.workers.records import UpdateResult


class Sampler:
    """All engines of a run as one. Nothing happens until `start` has given it the workers."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self.version = 0
        """Of the weights in the engines: the number of updates that were published."""
        self._group: WorkerGroup | None = None
        self._noticed: list[UpdateResult] = []

    def start(self, group: WorkerGroup, renderer: Renderer) -> None:
        """group: workers with engines, running. Publishes the weights that they hold. RolloutError for stop texts
        that the engine does not see.
        """
        self._group = group
        self._stop_ids, self._stop_texts = renderer.stops(self._cfg.rollout.stop)
        check_stop_texts(self._cfg.engine, self._stop_texts)
        group.all(EngineWorker.publish, self.version, expect_change=False)

    # Step functions.

    def generate(self, prompts: list[Prompt], step: int) -> Rollouts:
        """rollout.n samples of each prompt at the training temperature, from every engine at once."""
        return self.training_samples(prompts, step)

    def greedy(self, rollouts: Rollouts, step: int) -> Rollouts:
        """The most likely response to each prompt, for ReMax's baseline."""
        sampling = self.sampling(1, 0.0, 1.0, -1)
        return self.sample(rollouts.prompts, sampling, f"greedy/{step}")

    def publish(self, updates: list[UpdateResult]) -> SyncReport:
        """The new weights into the engines, under the next version; all ranks added up."""
        self.notice(updates)
        return self.publish_noticed()

    def notice(self, updates: list[UpdateResult]) -> None:
        """Updates whose weights `publish_noticed` gives the engines, of a step that samples nothing."""
        self._noticed += updates

    def publish_noticed(self) -> SyncReport:
        """The weights after all updates since the last publish into the engines; all ranks added up."""
        updates, self._noticed = self._noticed, []
        self.version += 1
        changed = any(
            update.report.updated and update.report.grad_norm > 0 and update.report.lr > 0 for update in updates
        )
        reports = self._engines().all(EngineWorker.publish, self.version, expect_change=changed)
        return functools.reduce(operator.add, reports)

    # What they are made of.

    def training_samples(self, prompts: Sequence[Prompt], step: int, first: int = 0) -> Rollouts:
        """As `generate`; first: the place of the first prompt among all prompts of the step."""
        rollout = self._cfg.rollout
        sampling = self.sampling(rollout.n, rollout.temperature, rollout.top_p, rollout.top_k)
        return self.sample(prompts, sampling, f"train/{step}", first)

    def sampling(self, n: int, temperature: float, top_p: float, top_k: int) -> Sampling:
        """These settings with the run's longest response and its stops."""
        return Sampling(
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=self._cfg.data.max_response_length,
            stop_token_ids=self._stop_ids,
            stop=self._stop_texts,
        )

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, purpose: str, first: int = 0) -> Rollouts:
        """Prompts dealt out to the engines in turn, and back in order. A sample's seed depends on the purpose and the
        place of its prompt. first: the place of the first prompt, if these are some of more.
        """
        group = self._engines()
        engines = group.grid.num_engines
        places = range(first, first + len(prompts))
        requests = [
            Request(prompt.token_ids, self._seed(purpose, place)) for prompt, place in zip(prompts, places, strict=True)
        ]
        dealt = [requests[e::engines] for e in range(engines)]
        answers = group.each_engine(EngineWorker.generate, dealt, sampling)
        return Rollouts.from_answers(prompts, sampling.n, answers)

    def state(self) -> dict[str, Any]:
        """The version."""
        return {"version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before `start`: the engines get their weights under the version that they had."""
        self.version = state["version"]

    def _seed(self, purpose: str, place: int) -> int | None:
        if not self._cfg.rollout.seed_per_sample:
            return None
        return random.Random(f"{self._cfg.trainer.seed}/{purpose}/{place}").getrandbits(32)

    def _engines(self) -> WorkerGroup:
        if self._group is None:
            raise FlowError("the run has no engines yet -- call its trainer's start() first")
        return self._group
