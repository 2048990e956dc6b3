"""The models of a run and the batch of its step, on their workers."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.errors import FlowError
from megatron_rl.learning.batch import Batch, OnRanks, plan_roles
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.types import Column, Rollouts
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.records import ModelColumn, Read, Role
from megatron_rl.workers.train import TrainWorker

Made = OnRanks | Tensor | float
"""A column that a pass has written, or what a node of one's own gives in its place: [T] values, or one for all"""
WorkerT = TypeVar("WorkerT")
EntryT = TypeVar("EntryT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


class Models:
    """Nothing happens until `start` has given it the workers."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.guard = NonFiniteGuard(cfg.trainer)
        self._group: WorkerGroup | None = None

    def start(self, group: WorkerGroup) -> None:
        """group: the workers that train, running."""
        self._group = group

    @property
    def group(self) -> WorkerGroup:
        if self._group is None:
            raise FlowError("the run has no workers yet -- call its trainer's start() first")
        return self._group

    def on_each(
        self,
        method: Callable[Concatenate[WorkerT, EntryT, P], ResultT],
        entry: EntryT,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[ResultT]:
        """The same call on all ranks; a result of each data-parallel replica."""
        return self.group.each_dp(method, [entry] * self.group.grid.num_dp, *args, **kwargs)

    def forward(
        self, plan: BatchPlan, role: Role, into: Mapping[ModelColumn, Column], temperature: float | None = None
    ) -> None:
        """One pass of a role's model over the plan's sequences. into: the columns that the ranks write.

        temperature: of the softmax over logits, that of sampling by default.
        """
        read = Read(tuple(into), self.cfg.rollout.temperature if temperature is None else temperature)
        self.group.each_dp(TrainWorker.forward, plan.passes(), role, read, into)

    def fetch(self, batch: Batch, made: OnRanks) -> Tensor:
        """[T] float32 a column, sequence after sequence: for a person, or a node of one's own."""
        return batch.join_tokens(self.on_each(BatchWorker.fetch, made.column))

    def put(self, batch: Batch, column: Column, made: Made) -> None:
        """Bring to the ranks what a node of one's own made; what a pass has written is there."""
        if isinstance(made, OnRanks):
            if made.column != column:
                raise FlowError(
                    f"column {made.column!r} stands where {column!r} belongs -- return its values (models.fetch)"
                )
            return
        whole = torch.as_tensor(made, dtype=torch.float32).expand(batch.num_tokens)
        self.group.each_dp(BatchWorker.put, batch.split_tokens(whole), column)


@dataclass(frozen=True)
class Assembled:
    """The batch of a step, loaded on the ranks, and the actor's plan."""

    batch: Batch
    plan: BatchPlan


def load_rollouts(models: Models, rollouts: Rollouts, roles: Sequence[TrainingConfig]) -> tuple[Batch, list[BatchPlan]]:
    """Plan the mini-batches of each role over one assignment to ranks, and have each rank fetch its sequences."""
    group_ids = rollouts.group_ids
    minis = [(group_ids // training.mini_batch_size).tolist() for training in roles]
    seq_lens = tuple(rollouts.seq_lens.tolist())
    plans, numbers = plan_roles(models.cfg, seq_lens, list(zip(roles, minis, strict=True)))
    batch = Batch(
        seq_lens,
        response_lens=torch.from_numpy(rollouts.lens.astype(np.int64)),
        numbers=numbers,
        group_ids=torch.from_numpy(group_ids.astype(np.int64)),
        was_cut=torch.from_numpy(rollouts.was_cut),
        names=rollouts.names,
    )
    models.group.each_dp(BatchWorker.load, [rollouts.refs(of_rank) for of_rank in numbers])
    return batch, plans
