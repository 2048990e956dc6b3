"""The batch of a step on one rank of this process, without models: what is computed between passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.algos.gae import alone
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.worker_group import start_group
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.learning.batch import Batch
from megatron_rl.learning.passes import Models, load_rollouts
from megatron_rl.types import RolloutGroup
from megatron_rl.workers.batch import BatchWorker
from tests.helpers.rollouts import rollouts_of


class BatchRank:
    """A worker that holds a batch and nothing else."""

    batch: BatchWorker

    def __init__(self, rank: int, world: int, cfg: RunConfig) -> None:
        self.batch = BatchWorker(cfg, alone, has_columns=True)

    def close(self) -> None:
        """Nothing to end."""


def start_models(models: Models) -> None:
    """Give `models` one rank of this process."""
    inline = replace(models.cfg.cluster, backend="inline")
    models.start(start_group(BatchRank, (models.cfg,), inline, RankGrid.flat(1), "cpu"))


def loaded(cfg: RunConfig, groups: Sequence[RolloutGroup]) -> tuple[Models, Batch, BatchPlan]:
    """Models whose one rank holds the rollouts."""
    models = Models(cfg)
    start_models(models)
    batch, (plan,) = load_rollouts(models, rollouts_of(groups), [cfg.actor_training])
    return models, batch, plan
