"""PPO with a critic (Schulman et al. 2017), read top to bottom: one step is the flow that `PpoTrainer._flow` lists.

    prompts -> generate -> assemble -> (reward || old_logprobs || ref_logprobs || values) -> advantages
            -> (update_critic || update) -> publish

With critic.share_backbone one forward pass (both_heads) gives values and old_logprobs, and one update trains both.
A critic replaced by a constant or by a function of one's own is one line: `trainer.flow.replace("values",
constant(0.0))`. Nodes that any algorithm has are in base.py; what a node computes is in algos/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.flow import Flow, Node
from megatron_rl.learning.credit import credit
from megatron_rl.learning.selection import leave_out
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers import report
from megatron_rl.trainers.base import RlTrainer, bare, sequence_names
from megatron_rl.trainers.placement import Workers, plan_for, start_workers
from megatron_rl.types import RolloutGroup, TrainBatch
from megatron_rl.workers.objectives import Objective, PolicyObjective, PolicyValueObjective, ValueObjective
from megatron_rl.workers.records import Role, UpdateResult
from megatron_rl.workers.train import TrainWorker

Tensor = torch.Tensor


class PpoTrainer(RlTrainer):
    """One step is self.flow, over the state of RlTrainer; the critic lives on the policy's ranks."""

    def __init__(self, cfg: RunConfig) -> None:
        self.critic_training = cfg.critic_training
        self.shared = cfg.critic.share_backbone
        super().__init__(cfg)
        # A step that does not update the actor has no other pass that measures its log-probabilities.
        self.needs_old_logprobs |= self.shared or cfg.trainer.critic_warmup > 0
        self.flow = self._flow()

    def start_workers(self) -> Workers:
        """The ranks with actor, critic, reference and engine, and how many optimizer steps each will make."""
        cfg = self.cfg
        minis = cfg.data.train_batch_size // self.critic_training.mini_batch_size
        return start_workers(
            cfg,
            (self.total_steps - cfg.trainer.critic_warmup) * self.num_updates,
            with_engine=True,
            critic_optimizer_steps=self.total_steps * minis * self.critic_training.epochs,
        )

    def _flow(self) -> Flow:
        batch = {"batch": TrainBatch, "group_ids": Tensor, "plan": BatchPlan, "critic_plan": BatchPlan}
        model_pass = {"batch": TrainBatch, "plan": BatchPlan}
        passes: list[Node] = []
        seen: dict[str, Any] = {"values": Tensor}
        if self.shared:
            both = {"old_logprobs": Tensor, "head_values": Tensor}
            passes.append(Node("both_heads", self.both_heads, model_pass, both, "policy"))
            passes.append(Node("values", lambda head_values: head_values, {"head_values": Tensor}, {"values": Tensor}))
        else:
            takes = {"batch": TrainBatch, "critic_plan": BatchPlan}
            passes += [self.old_logprobs_node()] if self.needs_old_logprobs else []
            passes.append(Node("values", self.values, takes, {"values": Tensor}, "critic"))
        if self.needs_old_logprobs:
            seen["old_logprobs"] = Tensor
        if self.cfg.needs_reference:
            passes.append(self.ref_logprobs_node())
            seen["ref_logprobs"] = Tensor
        trained = {"train_batch": TrainBatch, "train_plan": BatchPlan, "kept": Tensor, "counts": dict[str, float]}
        critic = {"critic_batch": TrainBatch, "seen_values": Tensor, "returns": Tensor}
        updates = {"updates": list[UpdateResult], "train_logprobs": Tensor}
        rows = {"groups": list[RolloutGroup]}
        update_takes = {"train_batch": TrainBatch, "train_plan": BatchPlan, "step": int} | rows
        update_takes |= {"plan": BatchPlan, "kept": Tensor}
        critic_takes = {"critic_batch": TrainBatch, "critic_plan": BatchPlan} | rows
        update_critic = Node(
            "update_critic", self.update_critic, critic_takes, {"critic_updates": list[UpdateResult]}, "critic"
        )
        nodes = [
            self.generate_node(),
            Node("assemble", self.assemble, {"groups": list[RolloutGroup]}, batch),
            self.reward_node(),
            *passes,
            Node(
                "advantages",
                self.advantages,
                {"batch": TrainBatch, "group_ids": Tensor, "plan": BatchPlan}
                | {"groups": list[RolloutGroup], "results": list[RewardResult]}
                | seen,
                trained | critic,
            ),
            *([] if self.shared else [update_critic]),
            Node("update", self.update, update_takes, updates, "policy"),
            self.publish_node(),
        ]
        return Flow(nodes, sources=self.sources)

    def train_step(self, step: int) -> dict[str, float]:
        """One step; returns its metrics (report.py reads them off the flow's values)."""
        values, metrics = self.run_flow(step)
        models = {"policy": "updates"} | ({} if self.shared else {"critic": "critic_updates"})
        skips = self.guard.metrics({name: [u.report for u in values[key]] for name, key in models.items()})
        return metrics | values["counts"] | report.critic_metrics(values) | skips | self.kl_control.metrics()

    def assemble(self, groups: list[RolloutGroup]) -> dict[str, Any]:
        """Pack the rollouts; plan the actor's mini-batches and the critic's."""
        found = super().assemble(groups)
        minis = (found["group_ids"] // self.critic_training.mini_batch_size).tolist()
        return found | {"critic_plan": plan_for(self.cfg, found["batch"].seq_lens, minis, self.critic_training)}

    def values(self, batch: TrainBatch, critic_plan: BatchPlan) -> Tensor:
        """[T] the critic's value of the state that each sampled token was chosen in."""
        return self.read(batch, critic_plan, "critic", "values")["values"]

    def both_heads(self, batch: TrainBatch, plan: BatchPlan) -> dict[str, Tensor]:
        """Log-probabilities and values [T] from one forward pass of the shared transformer."""
        columns = self.read(batch, plan, "actor", "logprobs", "values")
        return {"old_logprobs": columns["logprobs"], "head_values": columns["values"]}

    def advantages(
        self,
        batch: TrainBatch,
        group_ids: Tensor,
        plan: BatchPlan,
        groups: list[RolloutGroup],
        results: list[RewardResult],
        values: Tensor | float,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> dict[str, Any]:
        """GAE's advantages and returns of every token, whitened over the step; loss weights of actor and critic."""
        algorithm, mask = self.cfg.algorithm, batch.loss_mask
        values = torch.as_tensor(values, dtype=torch.float32).expand(batch.num_tokens) * mask
        rewards = self.token_rewards(batch, results, old_logprobs, ref_logprobs)
        found = credit(algorithm.adv_estimator, batch, group_ids, rewards, values=values)
        advantages, returns = found.advantages, found.returns
        assert returns is not None, algorithm.adv_estimator
        # The actor leaves out what it may not learn from; the critic's targets hold for every sampled token.
        shaped = leave_out(self.cfg, batch, groups, torch.zeros(batch.num_sequences, dtype=torch.bool), old_logprobs)
        targets = {"old_values": values, "returns": returns}
        trained = self.update_inputs(batch, group_ids, plan, shaped, advantages, old_logprobs, ref_logprobs)
        if self.shared:
            trained["train_batch"] = trained["train_batch"].with_(**targets)
        critic_weights = self.mini_batch_weights(batch, group_ids, mask, self.critic_training)
        return trained | {
            "critic_batch": bare(batch).with_(**targets, loss_weights=critic_weights),
            "seen_values": values,
            "returns": returns,
        }

    def update_critic(
        self, critic_batch: TrainBatch, critic_plan: BatchPlan, groups: list[RolloutGroup]
    ) -> list[UpdateResult]:
        """ppo_epochs passes of the critic over its mini-batches, an optimizer step each."""
        epochs, rows = self.critic_training.epochs, sequence_names(groups)
        objective = ValueObjective(self.cfg.critic.cliprange_value)
        return self.run_updates(
            critic_batch,
            critic_plan,
            epochs,
            lambda micros: self.workers.train.each_dp(TrainWorker.step, micros, "critic", objective),
            rows,
            "critic",
        )[0]

    def update(
        self,
        train_batch: TrainBatch,
        train_plan: BatchPlan,
        step: int,
        groups: list[RolloutGroup],
        plan: BatchPlan,
        kept: Tensor,
    ) -> dict[str, Any]:
        """ppo_epochs passes of the actor over its mini-batches; none while the critic warms up."""
        cfg = self.cfg
        epochs = 0 if step <= cfg.trainer.critic_warmup else cfg.actor.ppo_epochs
        left_out = self.left_out_logprobs(train_batch, plan, kept)
        objective: Objective = PolicyObjective(cfg.actor, cfg.rollout.temperature)
        if self.shared:
            objective = PolicyValueObjective(objective, ValueObjective(cfg.critic.cliprange_value), cfg.critic.vf_coef)
        updates, logprobs = self.run_updates(
            train_batch,
            train_plan,
            epochs,
            lambda micros: self.workers.train.each_dp(TrainWorker.step, micros, "actor", objective),
            sequence_names(groups),
        )
        return {"updates": updates, "train_logprobs": logprobs + left_out}

    def save(self, path: str) -> None:
        """The actor in Hugging Face form, and the critic beside it, in a folder `critic`."""
        super().save(path)
        role: Role = "actor" if self.shared else "critic"
        self.workers.train.rank0(TrainWorker.save, role, str(Path(path).with_name("critic")), "value_model")
