"""What every algorithm that samples and scores has in common: data, sampling, rewards, model passes, validation.

No algorithm is here. A trainer (grpo.py, ppo.py) takes these nodes, adds its own advantages and update, and
lists the flow.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from megatron_rl.algos.kl import KL_ESTIMATORS
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.cluster import stop
from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import BatchPlan, MicroBatches, collect_column, from_rollouts, select_micro_batches
from megatron_rl.data.prompts import PromptSet, load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.stream import open_stream, steps_per_epoch
from megatron_rl.experience.scoring import RunRewards, require_scores
from megatron_rl.flow import Flow, Node
from megatron_rl.learning.kl_control import KlControl
from megatron_rl.learning.mismatch import MismatchGuard
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.learning.selection import Shaped, length_penalties, loss_old_logprobs, response_lens
from megatron_rl.rewards.base import RewardResult
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.trainers import report
from megatron_rl.trainers.placement import Workers, plan_for, start_workers
from megatron_rl.trainers.validation import validation_metrics
from megatron_rl.types import Prompt, Rollout, RolloutGroup, Rollouts, SyncReport, TrainBatch
from megatron_rl.workers.engine import EngineWorker
from megatron_rl.workers.records import ModelColumn, Read, Role, UpdateResult
from megatron_rl.workers.train import TrainWorker

Tensor = torch.Tensor


class RlTrainer:
    """The run's state: data, workers, reward processes, weight version; and the nodes that algorithms share."""

    flow: Flow
    sources: ClassVar[dict[str, Any]] = {"prompts": list[Prompt], "step": int}
    """What a step is given."""

    def __init__(self, cfg: RunConfig) -> None:
        """Loads data and checks the reward before any worker starts, so that bad input costs seconds."""
        self.cfg = cfg
        self.renderer = Renderer.from_config(cfg.model, cfg.data)
        self.stop_ids, self.stop_texts = self.renderer.stops(cfg.rollout.stop)
        # An evaluation has no training files.
        self.train_set = load_prompts(cfg.data, cfg.data.train_files, self.renderer) if cfg.data.train_files else None
        self.val_set = (
            load_prompts(cfg.data, cfg.data.val_files, self.renderer, validation=True) if cfg.data.val_files else None
        )
        prompts = self.train_set.prompts if self.train_set else ()
        sources = [prompt.data_source for prompt in prompts]
        self.stream = open_stream(cfg.data, sources, cfg.trainer.seed) if prompts else None
        epoch = steps_per_epoch(len(prompts), cfg.data.train_batch_size)
        self.steps_per_epoch = epoch
        self.total_steps = cfg.trainer.total_training_steps or epoch * cfg.trainer.total_epochs
        # One mini-batch and one epoch: the policy that is updated is the one that sampled, and its log-probabilities
        # are those of the update itself.
        self.num_updates = cfg.data.train_batch_size // cfg.mini_batch_size * cfg.actor.ppo_epochs
        correction = cfg.algorithm.rollout_correction
        self.needs_old_logprobs = (
            (self.num_updates > 1 and not correction.bypass_mode)
            or cfg.algorithm.use_kl_in_reward
            or correction.measures_ratio
        )
        self.version = 0
        self.kl_control = KlControl(cfg.algorithm.kl_ctrl)
        self.guard = NonFiniteGuard(cfg.trainer)
        self.mismatch = MismatchGuard(cfg)
        self.rewards = RunRewards(cfg)
        try:
            self.rewards.preflight([*prompts, *(self.val_set.prompts if self.val_set else ())])
            self.workers = self.start_workers()
        except BaseException:
            self.rewards.close()
            raise
        try:
            self.rewards.start_models()
        except BaseException:
            self.close()
            raise
        self.workers.engines.all(EngineWorker.publish, self.version, expect_change=False)

    def start_workers(self) -> Workers:
        """The ranks with their models and engines."""
        return start_workers(self.cfg, self.total_steps * self.num_updates, with_engine=True)

    def next_prompts(self) -> list[Prompt]:
        """The next data.train_batch_size prompts."""
        assert self.train_set is not None and self.stream is not None, "an evaluation takes no steps"
        return [self.train_set.prompts[i] for i in self.stream.next()]

    def run_flow(self, step: int) -> tuple[dict[str, Any], dict[str, float]]:
        """One step over the next prompts: the flow's values, and the metrics that all algorithms have.

        Raises RolloutError where engine and trainer have differed too much for too long.
        """
        self.guard.step = step
        prompts = self.next_prompts()
        busy = self.workers.busy_seconds
        values = self.flow.run(prompts=prompts, step=step)
        self.last_groups, self.last_results = values["groups"], values["results"]
        busy = self.workers.busy_seconds - busy
        metrics = report.step_metrics(values, self.flow.last_timings, busy, on_policy=not self.needs_old_logprobs)
        return values, metrics | self.mismatch.look(step, metrics)

    # Nodes, in the order of a step.

    def generate_node(self) -> Node:
        return Node("generate", self.generate, self.sources, {"groups": list[RolloutGroup]}, "policy")

    def generate(self, prompts: list[Prompt], step: int) -> list[RolloutGroup]:
        """n samples of each prompt at the training temperature, from every engine at once."""
        return self.sample(prompts, *self.training_sampling, f"train/{step}")

    @property
    def training_sampling(self) -> tuple[int, float, float, int]:
        """n, temperature, top_p and top_k of training."""
        rollout = self.cfg.rollout
        return rollout.n, rollout.temperature, rollout.top_p, rollout.top_k

    def assemble_node(self) -> Node:
        gives = {"batch": TrainBatch, "group_ids": Tensor, "plan": BatchPlan}
        return Node("assemble", self.assemble, {"groups": list[RolloutGroup]}, gives)

    def assemble(self, groups: list[RolloutGroup]) -> dict[str, Any]:
        """Pack the rollouts, and plan which sequence goes to which mini-batch, rank and micro-batch."""
        batch, group_ids = from_rollouts(groups)
        minis = (group_ids // self.cfg.mini_batch_size).tolist()
        return {"batch": batch, "group_ids": group_ids, "plan": plan_for(self.cfg, batch.seq_lens, minis)}

    def reward_node(self) -> Node:
        return Node("reward", self.reward, {"groups": list[RolloutGroup]}, {"results": list[RewardResult]}, "reward")

    def reward(self, groups: list[RolloutGroup]) -> list[RewardResult]:
        """One result per sequence, group after group. Too many failures stop the run."""
        return self.rewards.score(groups)

    def old_logprobs_node(self) -> Node:
        takes = {"batch": TrainBatch, "plan": BatchPlan}
        return Node("old_logprobs", self.old_logprobs, takes, {"old_logprobs": Tensor}, "policy")

    def old_logprobs(self, batch: TrainBatch, plan: BatchPlan) -> Tensor:
        """The sampling policy's log-probabilities, by the trainer, in the micro-batches that the update will use."""
        return self.read(batch, plan, "actor", "logprobs")["logprobs"]

    def read(self, batch: TrainBatch, plan: BatchPlan, role: Role, *columns: ModelColumn) -> dict[str, Tensor]:
        """The columns [T] that a forward pass of a role's model gives, in the plan's micro-batches."""
        ranks = plan.passes()
        micros = select_micro_batches(bare(batch), ranks)
        read = Read(columns, self.cfg.rollout.temperature)
        by_rank = self.workers.train.each_dp(TrainWorker.forward, micros, role, read)
        return {
            column: collect_column(batch, ranks, [[micro[column] for micro in rank] for rank in by_rank])
            for column in columns
        }

    def left_out_logprobs(self, batch: TrainBatch, plan: BatchPlan, kept: Tensor) -> Tensor:
        """[T] the policy's log-probabilities of sequences that its update leaves out, 0 elsewhere: an on-policy step
        has no other pass over them, and engine and trainer are compared on all that was sampled (contract N8).
        """
        if self.needs_old_logprobs or bool(kept.all()):
            return torch.zeros(batch.num_tokens)
        return self.old_logprobs(batch, plan.keep(~kept))

    def ref_logprobs_node(self) -> Node:
        takes = {"batch": TrainBatch, "plan": BatchPlan}
        return Node("ref_logprobs", self.ref_logprobs, takes, {"ref_logprobs": Tensor}, "policy")

    def ref_logprobs(self, batch: TrainBatch, plan: BatchPlan) -> Tensor:
        """The reference model's, the same way."""
        return self.read(batch, plan, "reference", "logprobs")["logprobs"]

    def publish_node(self) -> Node:
        return Node("publish", self.publish, {"updates": list[UpdateResult]}, {"sync": SyncReport}, "policy")

    def publish(self, updates: list[UpdateResult]) -> SyncReport:
        """The new weights into the engines, under the next version; all ranks added up."""
        self.version += 1
        changed = any(
            update.report.updated and update.report.grad_norm > 0 and update.report.lr > 0 for update in updates
        )
        reports = self.workers.engines.all(EngineWorker.publish, self.version, expect_change=changed)
        return functools.reduce(operator.add, reports)

    # Pieces of advantages and update.

    def token_rewards(
        self,
        batch: TrainBatch,
        results: Sequence[RewardResult],
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
    ) -> Tensor:
        """[T] float32: each score on the last token of its sequence, less the KL penalty on every trained token."""
        algorithm = self.cfg.algorithm
        scores = self.scores(results, response_lens(batch))
        rewards = torch.zeros(batch.num_tokens, dtype=torch.float32)
        rewards[torch.cumsum(torch.tensor(batch.seq_lens), 0) - 1] = scores.float()
        if algorithm.use_kl_in_reward:
            assert old_logprobs is not None and ref_logprobs is not None
            kl = KL_ESTIMATORS[algorithm.kl_penalty](old_logprobs, ref_logprobs)
            rewards -= self.kl_control.coef * kl * batch.loss_mask
            self.kl_control.observe(kl, batch)
        return rewards

    def scores(self, results: Sequence[RewardResult], lens: Tensor) -> Tensor:
        """[S] float64: the rewards' values, with the penalty for responses of lens [S] tokens where there is one."""
        require_scores(results)
        return torch.tensor([result.value for result in results], dtype=torch.float64) + length_penalties(
            self.cfg, lens
        )

    def mini_batch_weights(
        self, batch: TrainBatch, group_ids: Tensor, trained: Tensor, training: TrainingConfig | None = None
    ) -> Tensor:
        """[T] float32 loss weights; each mini-batch has denominators of its own, over its tokens trained [T].

        training: of the model that is updated; the actor's if not given.
        """
        cfg, segments, training = self.cfg, batch.segments, training or self.cfg.actor_training
        minis = (group_ids // training.mini_batch_size)[segments]
        weights = torch.zeros(batch.num_tokens)
        for mini in range(int(minis.max()) + 1):
            mask = trained & (minis == mini)
            weights += loss_weights(
                training.loss_agg_mode, mask, segments, batch.num_sequences, cfg.data.max_response_length
            )
        return weights

    def update_inputs(
        self,
        batch: TrainBatch,
        group_ids: Tensor,
        plan: BatchPlan,
        shaped: Shaped,
        advantages: Tensor,
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
    ) -> dict[str, Any]:
        """What the actor's update takes: every column of its loss, the sequences that are left, and what was not."""
        columns = {
            "advantages": advantages,
            "loss_weights": self.mini_batch_weights(batch, group_ids, shaped.mask),
            **loss_old_logprobs(self.cfg, batch, old_logprobs, self.num_updates),
            **shaped.columns,
        }
        if ref_logprobs is not None:
            columns["ref_logprobs"] = ref_logprobs
        return {
            "train_batch": bare(batch).with_(**columns),
            "train_plan": plan.keep(shaped.kept),
            "kept": shaped.kept,
            "counts": shaped.counts,
        }

    def run_updates(
        self,
        batch: TrainBatch,
        plan: BatchPlan,
        epochs: int,
        update: Callable[[list[list[TrainBatch]]], Sequence[UpdateResult]],
        rows: Sequence[str],
        model: str = "actor",
    ) -> tuple[list[UpdateResult], Tensor]:
        """`epochs` passes over the mini-batches, an optimizer step each; one without sequences is passed over.

        update: takes [dp][micro-batch] batches, returns a result of each data-parallel rank. rows: what each sequence
        is called where numbers are not finite, model: whose step it is. Returns a result an optimizer step, and the
        [T] column that the steps of the first pass started from (zeros where there is none).
        """
        stop.commit()
        updates: list[UpdateResult] = []
        parts: list[list[Tensor]] = [[] for _ in range(self.cfg.dp_size)]
        if epochs:
            used = [s for ranks in plan.minis for rank in ranks for micro in rank for s in micro]
            self.guard.look_at_columns(batch, model, used, rows)
        for epoch in range(epochs):
            for mini, ranks in enumerate(plan.minis, start=1):
                results = update(select_micro_batches(batch, ranks)) if _has_sequences(ranks) else []
                for result in results[:1]:
                    self.guard.look(result.report, model, mini, ranks, rows)
                    updates.append(replace(result, memory_bytes=max(one.memory_bytes for one in results)))
                found = [list(result.column) for result in results] or [[torch.zeros(0)] * len(r) for r in ranks]
                if epoch == 0:
                    parts = [have + new for have, new in zip(parts, found, strict=True)]
        return updates, collect_column(batch, plan.passes(), parts) if epochs else torch.zeros(batch.num_tokens)

    # Sampling and validation.

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        temperature: float,
        top_p: float,
        top_k: int,
        purpose: str,
        first: int = 0,
    ) -> list[RolloutGroup]:
        """Prompts dealt out to the engines in turn, and back in order. Seeds go by purpose and place; `first`: the
        first prompt's place, where these are a part of more.
        """
        cfg, engines = self.cfg, self.workers.engines.grid.num_engines
        seeds = [
            random.Random(f"{cfg.trainer.seed}/{purpose}/{i}").getrandbits(32) if cfg.rollout.seed_per_sample else None
            for i in range(first, first + len(prompts))
        ]
        requests = [Request(prompt.token_ids, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        sampling = Sampling(
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=cfg.data.max_response_length,
            stop_token_ids=self.stop_ids,
            stop=self.stop_texts,
        )
        dealt = [requests[e::engines] for e in range(engines)]
        answers = self.workers.engines.each_engine(EngineWorker.generate, dealt, sampling)
        rollouts = Rollouts.from_answers(prompts, n, answers)
        return [rollouts.fetch_group(group) for group in range(rollouts.num_groups)]

    def validate(self, step: int) -> dict[str, float]:
        """Every validation row sampled val.n times and scored once each (contract R4)."""
        if self.val_set is None:
            return {}
        val, prompts = self.cfg.rollout.val, self.val_set.prompts
        size = self.cfg.data.val_batch_size or len(prompts)
        groups: list[RolloutGroup] = []
        for at in range(0, len(prompts), size):
            part = prompts[at : at + size]
            groups += self.sample(part, val.n, val.temperature, val.top_p, val.top_k, f"val/{step}", first=at)
        self.last_validation = (groups, self.reward(groups))
        return validation_metrics(*self.last_validation, val.pass_score)

    def validation_rows(self) -> list[dict[str, Any]]:
        """Each sample of the last validation with its score, row after row."""
        groups, results = self.last_validation
        rest = iter(results)
        return [
            {"row": group.prompt.index, **sample_record(group, rollout, next(rest))}
            for group in groups
            for rollout in group.rollouts
        ]

    def finished(self) -> bool:
        """A run that samples takes all its steps."""
        return False

    def sample_rollouts(self, count: int) -> list[dict[str, Any]]:
        """The first sample of evenly spread prompts of the last step."""
        groups = self.last_groups
        per_group = len(groups[0].rollouts)
        picked = [i * len(groups) // count for i in range(min(count, len(groups)))]
        return [sample_record(groups[i], groups[i].rollouts[0], self.last_results[i * per_group]) for i in picked]

    def save(self, path: str) -> None:
        """The actor in Hugging Face form."""
        self.workers.train.rank0(TrainWorker.save, "actor", path)

    def close(self) -> None:
        """End workers and reward processes."""
        try:
            self.rewards.close()
        finally:
            self.workers.close()

    def data_summary(self) -> dict[str, PromptSet]:
        """What was read, for the run's first lines."""
        sets = {"train": self.train_set, "val": self.val_set}
        return {
            name: replace(prompts, notes=(*prompts.notes, *self.rewards.notes(prompts.prompts)))
            for name, prompts in sets.items()
            if prompts is not None
        }


def sample_record(group: RolloutGroup, rollout: Rollout, result: RewardResult) -> dict[str, Any]:
    """One sample as rollouts.jsonl and an evaluation's answers.jsonl hold it."""
    return {
        "prompt": group.prompt.text,
        "response": rollout.text,
        "ground_truth": group.prompt.ground_truth,
        "reward": result.value,
        "failed": result.failed,
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.token_ids),
        "weight_version": group.weight_version,
        "data_source": group.prompt.data_source,
    }


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
