"""A run's rewards: reward processes from the start, and the models that score once the policy has its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rl.algos.filters import overlong_penalty
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.resources import Device, resolve_device
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.reward import RewardWorkerConfig
from megatron_rl.errors import FlowError, RewardError
from megatron_rl.experience.reward_samples import RolloutSamples, reward_sample
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.rewards.base import RewardResult, RewardSample, number_fault
from megatron_rl.rewards.compose import Results
from megatron_rl.rewards.scorer import ModelFn, RewardScorer
from megatron_rl.types import Prompt, Rollouts
from megatron_rl.workers.judge import JudgePlan, JudgeWorker
from megatron_rl.workers.reward_model import RewardModelPlan, RewardModelWorker, same_rendering

WorkerT = TypeVar("WorkerT")
MODEL_SAMPLES = 1024
"""Most samples that one worker of a reward model gets in a call: their texts are in memory here at that time."""


class RunRewards:
    """Scores the groups of a run. Close it before the policy: on one Ray, the last to leave shuts it down."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self._groups: dict[str, WorkerGroup] = {}
        self._started: RewardScorer | None = None

    def start(self) -> None:
        """Start the reward processes; models start with `start_models`."""
        self._started = RewardScorer(
            self._cfg.reward,
            models={
                "model": self._by("model", RewardModelWorker.score),
                "judge": self._by("judge", JudgeWorker.score),
            },
        )

    @property
    def _scorer(self) -> RewardScorer:
        if self._started is None:
            raise FlowError("the run has no reward processes yet -- call its trainer's start() first")
        return self._started

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Look at every row's ground truth, and score an empty response to the first prompt of each data source,
        models left out.

        Raises DataError naming data sources and rows that cannot be scored, RewardError where a reward cannot be
        loaded or fails.
        """
        samples = [reward_sample(prompt) for prompt in prompts]
        self._scorer.check_rows(samples)
        self._scorer.preflight(samples)

    def notes(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """By which rule the prompts' data sources are scored, where reward.function does not say it; a line each."""
        return tuple(self._scorer.notes([reward_sample(prompt) for prompt in prompts]))

    def start_models(self) -> None:
        """Start the workers of the models that rewards name, after the policy's: what those need comes first."""
        reward, plan = self._cfg.reward, self._scorer.plan
        if plan.uses("model"):
            device = self._device(reward.model)
            same = same_rendering(self._cfg.model, self._cfg.data, reward.model)
            args = (reward.model, RewardModelPlan(device, reward.failed_score, same))
            self._groups["model"] = self._start(RewardModelWorker, args, reward.model, device)
        if plan.uses("judge"):
            device = self._device(reward.judge)
            shape = read_model_shape(str(reward.judge.path))
            args = (reward.judge, JudgePlan(device, reward.failed_score, shape, self._cfg.trainer.seed))
            self._groups["judge"] = self._start(JudgeWorker, args, reward.judge, device)

    def score(self, rollouts: Rollouts) -> list[RewardResult]:
        """One result per sequence, group after group. RewardError once too many fail (reward.max_failed_share)."""
        with_ids = self._scorer.plan.uses("model")
        return self._scorer.score_or_stop(RolloutSamples(rollouts, with_ids))

    def close(self) -> None:
        """End the models' workers and the reward processes."""
        try:
            while self._groups:
                self._groups.popitem()[1].close()
        finally:
            started, self._started = self._started, None
            if started is not None:
                started.close()

    def _by(self, name: str, method: Callable[[WorkerT, Sequence[RewardSample]], list[RewardResult]]) -> ModelFn:
        def score(samples: Sequence[RewardSample]) -> Results:
            group = self._groups.get(name)
            if group is None:
                # Before the models are there, a preflight checks the rules around them.
                return [RewardResult(0.0)] * len(samples)
            count = group.grid.world
            scored: list[RewardResult] = []
            for first in range(0, len(samples), MODEL_SAMPLES * count):
                some = samples[first : first + MODEL_SAMPLES * count]
                results = group.each_dp(method, [list(some[i::count]) for i in range(count)])
                scored += [results[i % count][i // count] for i in range(len(some))]
            return list[RewardResult | None](scored)

        return score

    def _device(self, worker: RewardWorkerConfig) -> Device:
        return resolve_device(self._cfg.cluster.device if worker.device == "auto" else worker.device)

    def _start(
        self, worker_cls: type, args: tuple[object, ...], worker: RewardWorkerConfig, device: Device
    ) -> WorkerGroup:
        cluster = self._cfg.cluster
        count = 1 if cluster.backend == "inline" else worker.num_workers
        own = replace(cluster, nnodes=1, n_gpus_per_node=count, num_cpus_per_rank=worker.num_cpus)
        # A worker that shares a policy rank's GPU asks Ray for none.
        return start_group(worker_cls, args, own, RankGrid.flat(count), device if worker.own_gpu else "cpu")


def length_penalties(cfg: RunConfig, response_lens: Tensor) -> Tensor:
    """[S] float64 added to scores for length (algorithm.overlong_buffer); 0 where that is off."""
    buffer = cfg.algorithm.overlong_buffer
    if not buffer.enable:
        return torch.zeros(len(response_lens), dtype=torch.float64)
    return overlong_penalty(response_lens, cfg.data.max_response_length, buffer.len, buffer.penalty_factor)


def scores_of(results: Sequence[RewardResult], penalties: Tensor) -> Tensor:
    """[S] float64: the rewards' values with the penalties [S] for length.

    Raises RewardError if a score is not finite or too large: a node of the user's own may have made it.
    """
    for number, result in enumerate(results):
        fault = number_fault(result.value)
        if fault is not None:
            raise RewardError(
                f"the flow's reward node gave {result.value!r} to sequence {number} of the batch -- {fault}"
            )
    return torch.tensor([result.value for result in results], dtype=torch.float64) + penalties
