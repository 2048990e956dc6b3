"""The batch of a step, and what the models do with it: forward passes and updates, as step functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.cluster import stop
from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import (
    BatchPlan,
    MicroBatches,
    collect_column,
    from_rollouts,
    plan_batches,
    select_micro_batches,
)
from megatron_rl.errors import FlowError
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.types import RolloutGroup, TrainBatch
from megatron_rl.workers.objectives import Objective, PolicyObjective, PolicyValueObjective, ValueObjective
from megatron_rl.workers.records import ModelColumn, Read, Role, UpdateResult
from megatron_rl.workers.train import TrainWorker


class Models:
    """The models of a run, on their workers. Nothing happens until `start` has given it the workers."""

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


@dataclass(frozen=True)
class Assembled:
    """The rollouts of a step, end to end, and where each goes."""

    batch: TrainBatch
    group_ids: Tensor
    """[S] int64: the group of each sequence"""
    plan: BatchPlan


@dataclass(frozen=True)
class Updates:
    """What the optimizer steps of a step did."""

    updates: list[UpdateResult]
    train_logprobs: Tensor
    """[T] log-probabilities that the first pass over the mini-batches started from"""


def assemble(cfg: RunConfig, groups: list[RolloutGroup], greedy: list[RolloutGroup] | None = None) -> Assembled:
    """Pack the rollouts, and plan which sequence goes to which mini-batch, rank and micro-batch.

    greedy: waited for, if the step samples them, and not used: the engine gives its memory up to the first model pass.
    """
    batch, group_ids = from_rollouts(groups)
    return Assembled(batch, group_ids, plan_for(cfg, batch.seq_lens, (group_ids // cfg.mini_batch_size).tolist()))


def plan_for(
    cfg: RunConfig, seq_lens: Sequence[int], mini_of: Sequence[int], training: TrainingConfig | None = None
) -> BatchPlan:
    """The batch plan of a run: its data-parallel ranks, its token budget, its pipeline.

    training: of the model that is updated; the actor's if not given.
    """
    training = training or cfg.actor_training
    parallel = training.parallel
    unit = 2 * parallel.cp if parallel.cp > 1 else 1
    return plan_batches(
        # Context parallelism pads each sequence to whole chunks.
        [-(-length // unit) * unit for length in seq_lens],
        mini_of,
        dp=cfg.dp_size,
        max_tokens=training.max_tokens_per_gpu * parallel.cp,
        max_seqs=training.micro_batch_size,
        multiple=parallel.pp if parallel.vpp > 1 else 1,
        packed=parallel.packing,
    )


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
        or not own_update
    )


def old_logprobs(models: Models, batch: TrainBatch, plan: BatchPlan) -> Tensor:
    """[T] the sampling policy's log-probabilities, by the trainer, in the micro-batches that the update will use."""
    return forward(models, batch, plan, "actor", Read(("logprobs",), models.cfg.rollout.temperature))["logprobs"]


def ref_logprobs(models: Models, batch: TrainBatch, plan: BatchPlan) -> Tensor:
    """[T] the reference model's, in the same way."""
    return forward(models, batch, plan, "reference", Read(("logprobs",), models.cfg.rollout.temperature))["logprobs"]


def forward(models: Models, batch: TrainBatch, plan: BatchPlan, role: Role, read: Read) -> dict[ModelColumn, Tensor]:
    """The columns [T] that a forward pass of a role's model gives, in the plan's micro-batches."""
    ranks = plan.passes()
    micros = select_micro_batches(bare(batch), ranks)
    by_rank = models.group.each_dp(TrainWorker.forward, micros, role, read)
    return {
        column: collect_column(batch, ranks, [[micro[column] for micro in rank] for rank in by_rank])
        for column in read.columns
    }


def update(
    models: Models,
    train_batch: TrainBatch,
    train_plan: BatchPlan,
    groups: list[RolloutGroup],
    plan: BatchPlan,
    kept: Tensor,
    step: int,
) -> Updates:
    """ppo_epochs passes of the actor over its mini-batches, an optimizer step each; none while a critic warms up."""
    cfg = models.cfg
    rests = cfg.needs.critic and step <= cfg.trainer.critic_warmup
    objective: Objective = PolicyObjective(cfg.actor, cfg.rollout.temperature)
    if cfg.needs.critic and cfg.critic.share_backbone:
        objective = PolicyValueObjective(objective, ValueObjective(cfg.critic.cliprange_value), cfg.critic.vf_coef)
    skipped = skipped_logprobs(models, train_batch, plan, kept)
    epochs, rows = 0 if rests else cfg.actor.ppo_epochs, sequence_names(groups)
    updates, logprobs = run_updates(models, "actor", objective, train_batch, train_plan, epochs, rows)
    return Updates(updates, logprobs + skipped)


def skipped_logprobs(models: Models, batch: TrainBatch, plan: BatchPlan, kept: Tensor) -> Tensor:
    """[T] the policy's log-probabilities of sequences that its update leaves out, 0 elsewhere: an on-policy step has no
    other pass over them, and engine and trainer are compared on all that was sampled (contract N8).
    """
    if needs_old_logprobs(models.cfg) or bool(kept.all()):
        return torch.zeros(batch.num_tokens)
    return old_logprobs(models, batch, plan.keep(~kept))


def run_updates(
    models: Models,
    role: Role,
    objective: Objective,
    batch: TrainBatch,
    plan: BatchPlan,
    epochs: int,
    rows: Sequence[str],
) -> tuple[list[UpdateResult], Tensor]:
    """`epochs` passes over the mini-batches, an optimizer step each; one without sequences is passed over.

    rows: what each sequence is called if numbers are not finite. Returns a result an optimizer step, and the [T] column
    that the steps of the first pass started from (zeros if there is none).
    """
    stop.commit()
    updates: list[UpdateResult] = []
    columns: list[list[Tensor]] = [[] for _ in range(models.cfg.dp_size)]
    if epochs:
        used = [s for ranks in plan.minis for rank in ranks for micro in rank for s in micro]
        models.guard.look_at_columns(batch, role, used, rows)
    for epoch in range(epochs):
        for mini, ranks in enumerate(plan.minis, start=1):
            micros = select_micro_batches(batch, ranks)
            step = models.group.each_dp
            results = step(TrainWorker.step, micros, role, objective) if _has_sequences(ranks) else []
            for result in results[:1]:
                models.guard.look(result.report, role, mini, ranks, rows)
                updates.append(replace(result, memory_bytes=max(one.memory_bytes for one in results)))
            pieces = [list(result.column) for result in results] or [[torch.zeros(0)] * len(r) for r in ranks]
            if epoch == 0:
                columns = [have + new for have, new in zip(columns, pieces, strict=True)]
    return updates, collect_column(batch, plan.passes(), columns) if epochs else torch.zeros(batch.num_tokens)


def bare(batch: TrainBatch) -> TrainBatch:
    """Tokens and mask alone: what a forward pass needs."""
    return TrainBatch(batch.tokens, batch.seq_lens, batch.loss_mask)


def sequence_names(groups: Sequence[RolloutGroup]) -> list[str]:
    """What each sequence is called in messages: the file and row of its prompt, and its sample."""
    return [
        f"{group.prompt.where or f'row {group.prompt.index}'} sample {number}"
        for group in groups
        for number in range(1, len(group.rollouts) + 1)
    ]


def _has_sequences(ranks: Sequence[MicroBatches]) -> bool:
    return any(micro for rank in ranks for micro in rank)
