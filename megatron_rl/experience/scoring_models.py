"""Models that score: reward models and judges on workers of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.resources import Device
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.checks.reward import RewardPlan
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.reward import RewardWorkerConfig
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.rewards.compose import Results
from megatron_rl.rewards.scorer import ModelFn
from megatron_rl.workers.judge import JudgePlan, JudgeWorker
from megatron_rl.workers.reward_model import RewardModelPlan, RewardModelWorker, same_rendering

WorkerT = TypeVar("WorkerT")
MODEL_SAMPLES = 1024
"""Most samples that one worker of a reward model gets in a call: their texts are in memory here at that time."""


def nodes_for(copies: int, nnodes: int, per_node: int) -> int:
    """On how many nodes the copies of a model lie, equally many on each: as few of `nnodes` as have a GPU for each.
    Nodes have per_node GPUs. Ray chooses which nodes; if there is no such number, all copies are on one.
    """
    fits = (nodes for nodes in range(1, nnodes + 1) if copies % nodes == 0 and copies // nodes <= per_node)
    return next(fits, 1)


class ScoringModels:
    """The workers of a run's reward model and judge; none before `start`."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self._groups: dict[str, WorkerGroup] = {}

    def functions(self) -> dict[str, ModelFn]:
        """What a reward calls each model by -> its scores."""
        return {
            "model": self._by("model", RewardModelWorker.score),
            "judge": self._by("judge", JudgeWorker.score),
        }

    def start(self, plan: RewardPlan) -> None:
        """Start the models that the rewards name."""
        reward = self._cfg.reward
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

    def close(self) -> None:
        """End the workers."""
        while self._groups:
            self._groups.popitem()[1].close()

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
        cluster = self._cfg.cluster
        return ray_runtime.workers_device(cluster, cluster.device if worker.device == "auto" else worker.device)

    def _start(
        self, worker_cls: type, args: tuple[object, ...], worker: RewardWorkerConfig, device: Device
    ) -> WorkerGroup:
        cluster = self._cfg.cluster
        count = 1 if cluster.backend == "inline" else worker.num_workers
        nodes = nodes_for(count, cluster.nnodes, cluster.n_gpus_per_node)
        own = replace(cluster, nnodes=nodes, n_gpus_per_node=count // nodes, num_cpus_per_rank=worker.num_cpus)
        # A worker that shares a policy rank's GPU asks Ray for none.
        return start_group(worker_cls, args, own, RankGrid.flat(count), device if worker.own_gpu else "cpu")
