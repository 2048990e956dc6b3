"""GRPO (Shao et al. 2024) and its relatives, read top to bottom: one step is the flow that `GrpoTrainer._flow` lists.

    prompts -> generate -> assemble -> (reward || old_logprobs || ref_logprobs) -> advantages -> update -> publish

The flow is the program: `trainer.flow.describe()` prints it, `trainer.flow.replace("reward", fn)` changes it. Nodes
that any algorithm has are in base.py; what a node computes is in algos/ and data/; where it runs is in workers/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.algos.groups import flat_groups, sequence_sums
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.experience.dynamic import differing, sample_differing
from megatron_rl.flow import Flow, Node
from megatron_rl.learning.credit import credit
from megatron_rl.learning.selection import leave_out, length_penalties, response_lens
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers import report
from megatron_rl.trainers.base import RlTrainer, sequence_names
from megatron_rl.types import Prompt, RolloutGroup, TrainBatch
from megatron_rl.workers.objectives import PolicyObjective
from megatron_rl.workers.records import UpdateResult
from megatron_rl.workers.train import TrainWorker

Tensor = torch.Tensor


class GrpoTrainer(RlTrainer):
    """One step is self.flow, over the state of RlTrainer."""

    def __init__(self, cfg: RunConfig) -> None:
        super().__init__(cfg)
        self.needs_baselines = cfg.algorithm.adv_estimator.needs_greedy
        self.flow = self._flow()

    def _flow(self) -> Flow:
        after_old = {"old_logprobs": Tensor} if self.needs_old_logprobs else {}
        after_ref = {"ref_logprobs": Tensor} if self.cfg.needs_reference else {}
        baselines = {"baselines": Tensor} if self.needs_baselines else {}
        nodes = [
            *self._sampling_nodes(),
            *([self.old_logprobs_node()] if self.needs_old_logprobs else []),
            *([self.ref_logprobs_node()] if self.cfg.needs_reference else []),
            Node(
                "advantages",
                self.advantages,
                {"batch": TrainBatch, "group_ids": Tensor, "plan": BatchPlan}
                | {"groups": list[RolloutGroup], "results": list[RewardResult]}
                | after_old
                | after_ref
                | baselines,
                {"train_batch": TrainBatch, "train_plan": BatchPlan, "kept": Tensor, "counts": dict[str, float]},
            ),
            Node(
                "update",
                self.update,
                {"train_batch": TrainBatch, "train_plan": BatchPlan, "groups": list[RolloutGroup]}
                | {"plan": BatchPlan, "kept": Tensor},
                {"updates": list[UpdateResult], "train_logprobs": Tensor},
                "policy",
            ),
            self.publish_node(),
        ]
        return Flow(nodes, sources=self.sources)

    def _sampling_nodes(self) -> list[Node]:
        """Groups, their scores and the batch; with dynamic sampling one node samples and scores in turns."""
        groups = {"groups": list[RolloutGroup]}
        if self.cfg.algorithm.filter_groups.enable:
            gives = groups | {"results": list[RewardResult], "sampling": dict[str, float]}
            nodes = [Node("generate", self.generate_differing, self.sources, gives, "policy")]
        else:
            nodes = [self.generate_node(), self.reward_node()]
        if not self.needs_baselines:
            return [*nodes, self.assemble_node()]
        greedy = {"greedy": list[RolloutGroup]}
        # The batch waits for the greedy responses: the engine gives up its memory to the first model pass.
        assemble = replace(
            self.assemble_node(), fn=lambda groups, greedy: self.assemble(groups), inputs=groups | greedy
        )
        return [
            *nodes,
            Node("greedy", self.greedy, groups | {"step": int}, greedy, "policy"),
            assemble,
            Node("baselines", self.baselines, greedy, {"baselines": Tensor}, "reward"),
        ]

    def train_step(self, step: int) -> dict[str, float]:
        """One step; returns its metrics (report.py reads them off the flow's values)."""
        values, metrics = self.run_flow(step)
        metrics |= report.group_metrics(values) | values.get("sampling", {}) | values["counts"]
        skips = self.guard.metrics({"policy": [update.report for update in values["updates"]]})
        return metrics | skips | self.kl_control.metrics()

    def generate_differing(self, prompts: list[Prompt], step: int) -> dict[str, Any]:
        """Groups whose samples differ, from as many batches of prompts as that takes (DAPO)."""
        cfg, filters = self.cfg, self.cfg.algorithm.filter_groups

        def score(batch: list[Prompt], number: int) -> tuple[list[RolloutGroup], list[RewardResult]]:
            first = number * cfg.data.train_batch_size
            groups = self.sample(batch, *self.training_sampling, f"train/{step}", first=first)
            return groups, self.reward(groups)

        def differs(groups: Sequence[RolloutGroup], results: Sequence[RewardResult]) -> list[bool]:
            lens = torch.tensor([len(rollout.token_ids) for group in groups for rollout in group.rollouts])
            return differing(filters.metric, results, length_penalties(cfg, lens), cfg.rollout.n)

        found = sample_differing(prompts, self.next_prompts, score, differs, max_batches=filters.max_num_gen_batches)
        return {"groups": found.groups, "results": found.results, "sampling": found.counts}

    def greedy(self, groups: list[RolloutGroup], step: int) -> list[RolloutGroup]:
        """The most likely response to each prompt, for ReMax's baseline."""
        return self.sample([group.prompt for group in groups], 1, 0.0, 1.0, -1, f"greedy/{step}")

    def baselines(self, greedy: list[RolloutGroup]) -> Tensor:
        """[G] what the greedy responses score."""
        lens = torch.tensor([len(group.rollouts[0].token_ids) for group in greedy])
        return self.scores(self.reward(greedy), lens)

    def advantages(
        self,
        batch: TrainBatch,
        group_ids: Tensor,
        plan: BatchPlan,
        groups: list[RolloutGroup],
        results: list[RewardResult],
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        baselines: Tensor | None = None,
    ) -> dict[str, Any]:
        """Advantages and loss weights of every token; which sequences stay in the update."""
        cfg, algorithm = self.cfg, self.cfg.algorithm
        rewards = self.token_rewards(batch, results, old_logprobs, ref_logprobs)
        dropped = torch.zeros(batch.num_sequences, dtype=torch.bool)
        if algorithm.drop_flat_groups:
            dropped = flat_groups(sequence_sums(rewards, batch.segments, batch.num_sequences), group_ids)
        if algorithm.filter_groups.enable:
            penalties = length_penalties(cfg, response_lens(batch))
            differ = differing(algorithm.filter_groups.metric, results, penalties, cfg.rollout.n)
            dropped |= ~torch.tensor(differ)[group_ids]
        shaped = leave_out(cfg, batch, groups, dropped, old_logprobs)
        estimator = algorithm.adv_estimator
        advantages = credit(estimator, batch, group_ids, rewards, kept=~dropped, baselines=baselines).advantages
        return self.update_inputs(batch, group_ids, plan, shaped, advantages, old_logprobs, ref_logprobs)

    def update(
        self, train_batch: TrainBatch, train_plan: BatchPlan, groups: list[RolloutGroup], plan: BatchPlan, kept: Tensor
    ) -> dict[str, Any]:
        """ppo_epochs passes over the mini-batches, an optimizer step each."""
        objective = PolicyObjective(self.cfg.actor, self.cfg.rollout.temperature)
        left_out = self.left_out_logprobs(train_batch, plan, kept)
        updates, logprobs = self.run_updates(
            train_batch,
            train_plan,
            self.cfg.actor.ppo_epochs,
            lambda micros: self.workers.train.each_dp(TrainWorker.step, micros, "actor", objective),
            sequence_names(groups),
        )
        return {"updates": updates, "train_logprobs": logprobs + left_out}
