"""The models of a run on their workers, and what they do with the batch of a step: passes, updates.

Sequences are named by number and columns by name; both lie on the ranks (workers/rank_batch.py).
"""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_rl.cluster import stop
from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.errors import FlowError
from megatron_rl.learning.batch import Batch, OnRanks, plan_roles
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.types import Column, Rollouts
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.objectives import Objective, PolicyObjective, PolicyValueObjective, ValueObjective
from megatron_rl.workers.records import ModelColumn, Read, Role, UpdateResult
from megatron_rl.workers.train import TrainWorker

Made = OnRanks | Tensor | float
"""A column that a pass has written, or what a node of one's own gives in its place: [T] values, or one for all"""
LossColumns = Mapping[str, Column]
"""What a loss calls a column -> the column on the ranks"""
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


@dataclass(frozen=True)
class Updates:
    """What the optimizer steps of a step did."""

    updates: list[UpdateResult]
    mismatch: dict[str, float]
    """mismatch/... between engine and trainer, and kl/ref if there is a reference model"""


def needs_old_logprobs(cfg: RunConfig) -> bool:
    """Whether a step needs a pass for the sampling policy's log-probabilities.

    With one mini-batch and one epoch the policy that is updated is the one that sampled: its log-probabilities are
    those of the update itself. A step that may not update the actor by itself has no other pass that measures them.
    """
    correction = cfg.algorithm.rollout_correction
    own_update = not cfg.needs.critic or not (cfg.critic.share_backbone or cfg.trainer.critic_warmup > 0)
    return (
        (cfg.updates_per_step > 1 and not correction.bypass_mode)
        or cfg.algorithm.use_kl_in_reward
        or correction.measures_ratio
        or cfg.actor.router_replay == "old"
        or not own_update
    )


def old_logprobs(models: Models, batch: Batch, plan: BatchPlan) -> OnRanks:
    """The sampling policy's log-probabilities, by the trainer, in the micro-batches that the update will use."""
    models.forward(plan, "actor", {"logprobs": "old_logprobs"})
    return OnRanks("old_logprobs")


def ref_logprobs(models: Models, batch: Batch, plan: BatchPlan) -> OnRanks:
    """The reference model's, in the same way."""
    models.forward(plan, "reference", {"logprobs": "ref_logprobs"})
    return OnRanks("ref_logprobs")


def update(
    models: Models,
    batch: Batch,
    plan: BatchPlan,
    train_plan: BatchPlan,
    loss_columns: LossColumns,
    kept: Tensor,
    step: int,
) -> Updates:
    """ppo_epochs passes of the actor over its mini-batches, an optimizer step each; none while a critic warms up."""
    cfg = models.cfg
    objective: Objective = PolicyObjective(cfg.actor, cfg.rollout.temperature)
    if cfg.needs.critic and cfg.critic.share_backbone:
        value = ValueObjective(cfg.critic.cliprange_value)
        objective = PolicyValueObjective(objective, value, cfg.critic.vf_coef)
    measured = measure_left_out(models, plan, kept)
    into = "train_logprobs" if measured == "train_logprobs" else None
    rests = cfg.needs.critic and step <= cfg.trainer.critic_warmup
    epochs = 0 if rests else cfg.actor_training.epochs
    updates = run_updates(models, batch, train_plan, epochs, "actor", objective, loss_columns, into)
    return Updates(updates, models.on_each(BatchWorker.compare, measured)[0])


def measure_left_out(models: Models, plan: BatchPlan, kept: Tensor) -> Column:
    """The column with the sampling policy's log-probabilities, once the update has run.

    An on-policy step has no pass but its update, and engine and trainer are compared on all that was sampled (contract
    N8): here the sequences that the update leaves out get a pass of their own. kept: [S] bool, the others.
    """
    if needs_old_logprobs(models.cfg):
        return "old_logprobs"
    if not bool(kept.all()):
        models.forward(plan.keep(~kept), "actor", {"logprobs": "train_logprobs"})
    return "train_logprobs"


def run_updates(
    models: Models,
    batch: Batch,
    plan: BatchPlan,
    epochs: int,
    role: Role,
    objective: Objective,
    columns: LossColumns,
    into: Column | None = None,
) -> list[UpdateResult]:
    """`epochs` passes over the mini-batches, an optimizer step each; one without sequences is passed over. Returns a
    result of each optimizer step.

    columns: those of the loss. into: where the ranks keep what the steps of the first pass started from.
    """
    stop.commit()
    updates: list[UpdateResult] = []
    if epochs:
        look_at_columns(models, batch, plan, role, columns)
    for epoch in range(epochs):
        for mini, ranks in enumerate(plan.minis, start=1):
            if not any(micro for micros in ranks for micro in micros):
                continue
            started_from = into if epoch == 0 else None
            results = models.group.each_dp(TrainWorker.step, ranks, role, objective, columns, started_from)
            models.guard.look(results[0].report, role, mini, ranks, batch.names)
            updates.append(replace(results[0], memory_bytes=max(one.memory_bytes for one in results)))
    return updates


def look_at_columns(models: Models, batch: Batch, plan: BatchPlan, role: Role, columns: LossColumns) -> None:
    """Raise NonFiniteError if a column of the loss is not finite at a trained token of the plan's sequences. A run that
    passes over such mini-batches learns of it from their loss.
    """
    if not models.guard.stops:
        return
    used = [tuple(s for micro in micros for s in micro) for micros in plan.passes()]
    bad: dict[str, list[int]] = {}
    for of_rank in models.group.each_dp(BatchWorker.not_finite, used, columns):
        for name, numbers in of_rank.items():
            bad.setdefault(name, []).extend(numbers)
    models.guard.refuse_columns(bad, role, batch.names)
