"""GRPO (Shao et al. 2024), read top to bottom: one step is the flow that `GrpoTrainer._flow` lists.

    prompts -> generate -> assemble -> (reward || old_logprobs || ref_logprobs) -> advantages -> update -> publish

The flow is the program: `trainer.flow.describe()` prints it, `trainer.flow.replace("reward", fn)` changes it. What a
node
computes is in algos/ and data/; where it runs is in workers/.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.algos import ADVANTAGES
from megatron_rl.algos.advantages import AdvantageInputs, flat_groups, sequence_sums
from megatron_rl.algos.kl import KL_ESTIMATORS
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan, collect_column, from_rollouts, select_micro_batches
from megatron_rl.data.prompts import PromptSet, load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.stream import Stream, steps_per_epoch
from megatron_rl.errors import RewardError
from megatron_rl.flow import Flow, Node
from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.trainers import report
from megatron_rl.trainers.placement import plan_for, start_policy
from megatron_rl.types import Prompt, Rollout, RolloutGroup, TrainBatch
from megatron_rl.workers.policy import UpdateResult

Tensor = torch.Tensor


class GrpoTrainer:
    """The run's state: data, workers, reward processes, weight version; and its flow."""

    def __init__(self, cfg: RunConfig) -> None:
        """Loads data and checks the reward before any worker starts, so that bad input costs seconds."""
        self.cfg = cfg
        self.renderer = Renderer.from_config(cfg.model, cfg.data)
        self.train_set = load_prompts(cfg.data, cfg.data.train_files, self.renderer)
        self.val_set = (
            load_prompts(cfg.data, cfg.data.val_files, self.renderer, validation=True) if cfg.data.val_files else None
        )
        self.stream = Stream(
            num_items=len(self.train_set.prompts),
            batch_size=cfg.data.train_batch_size,
            shuffle=cfg.data.shuffle,
            seed=cfg.trainer.seed,
        )
        epoch = steps_per_epoch(len(self.train_set.prompts), cfg.data.train_batch_size)
        self.steps_per_epoch = epoch
        self.total_steps = cfg.trainer.total_training_steps or epoch * cfg.trainer.total_epochs
        # One mini-batch and one epoch: the policy that is updated is the one that sampled, and its log-probabilities
        # are those of the update itself.
        self.num_updates = cfg.data.train_batch_size // cfg.mini_batch_size * cfg.actor.ppo_epochs
        self.needs_old_logprobs = self.num_updates > 1 or cfg.algorithm.use_kl_in_reward
        self.version = 0
        reward = cfg.reward
        self.pool = RewardPool(
            reward.function,
            reward.kwargs,
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            failed_score=reward.failed_score,
        )
        try:
            self.pool.preflight(_reward_sample(self.train_set.prompts[0], Rollout((), (), "stop", "")))
            self.policy: WorkerGroup = start_policy(cfg, self.total_steps * self.num_updates, with_engine=True)
        except BaseException:
            self.pool.close()
            raise
        self.policy.publish(self.version, expect_change=False)
        self.flow = self._flow()

    def _flow(self) -> Flow:
        after_old = {"old_logprobs": Tensor} if self.needs_old_logprobs else {}
        after_ref = {"ref_logprobs": Tensor} if self.cfg.needs_reference else {}
        nodes = [
            Node("generate", self.generate, {"prompts": list[Prompt], "step": int}, {"groups": list[RolloutGroup]},
            "policy"),
            Node("assemble", self.assemble, {"groups": list[RolloutGroup]}, {"batch": TrainBatch, "group_ids":
            Tensor, "plan": BatchPlan}),
            Node("reward", self.reward, {"groups": list[RolloutGroup]}, {"results": list[RewardResult]}, "reward"),
            Node(
                "advantages",
                self.advantages,
                {"batch": TrainBatch, "group_ids": Tensor, "plan": BatchPlan, "results": list[RewardResult]} |
                after_old | after_ref,
                {"train_batch": TrainBatch, "train_plan": BatchPlan, "kept": Tensor},
            ),
            Node("update", self.update, {"train_batch": TrainBatch, "train_plan": BatchPlan}, {"updates":
            list[UpdateResult], "train_logprobs": Tensor}, "policy"),
            Node("publish", self.publish, {"updates": list[UpdateResult]}, {"sync_bytes": int}, "policy"),
        ]  # fmt: skip
        model_pass = {"batch": TrainBatch, "plan": BatchPlan}
        if self.needs_old_logprobs:
            nodes.append(Node("old_logprobs", self.old_logprobs, model_pass, {"old_logprobs": Tensor}, "policy"))
        if self.cfg.needs_reference:
            nodes.append(Node("ref_logprobs", self.ref_logprobs, model_pass, {"ref_logprobs": Tensor}, "policy"))
        return Flow(nodes, sources={"prompts": list[Prompt], "step": int})

    def train_step(self, step: int) -> dict[str, float]:
        """One step; returns its metrics (report.grpo_metrics reads them off the flow's values)."""
        prompts = [self.train_set.prompts[i] for i in self.stream.next()]
        busy = self.policy.busy_seconds
        values = self.flow.run(prompts=prompts, step=step)
        self.last_groups, self.last_results = values["groups"], values["results"]
        busy = self.policy.busy_seconds - busy
        return report.grpo_metrics(values, self.flow.last_timings, busy, on_policy=not self.needs_old_logprobs)

    # The nodes, in the order of the step.

    def generate(self, prompts: list[Prompt], step: int) -> list[RolloutGroup]:
        """n samples of each prompt at the training temperature, from every engine at once."""
        rollout = self.cfg.rollout
        return self._sample(prompts, rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, f"train/{step}")

    def assemble(self, groups: list[RolloutGroup]) -> dict[str, Any]:
        """Pack the rollouts, and plan which sequence goes to which mini-batch, rank and micro-batch."""
        batch, group_ids = from_rollouts(groups)
        plan = plan_for(self.cfg, batch.seq_lens, (group_ids // self.cfg.mini_batch_size).tolist())
        return {"batch": batch, "group_ids": group_ids, "plan": plan}

    def reward(self, groups: list[RolloutGroup]) -> list[RewardResult]:
        """One result per sequence, group after group. Too many failures stop the run."""
        samples = [_reward_sample(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        results = self.pool.score(samples)
        failed = [result for result in results if result.failed is not None]
        if len(failed) > self.cfg.reward.max_failed_share * len(results):
            raise RewardError(
                f"reward.function {self.cfg.reward.function!r} failed on {len(failed)} of {len(results)} samples, "
                f"more than reward.max_failed_share {self.cfg.reward.max_failed_share}; the first: {failed[0].failed}"
            )
        return results

    def old_logprobs(self, batch: TrainBatch, plan: BatchPlan) -> Tensor:
        """The sampling policy's log-probabilities, by the trainer, in the micro-batches that the update will use."""
        ranks = plan.passes()
        found = self.policy.logprobs(select_micro_batches(_bare(batch), ranks), self.cfg.rollout.temperature)
        return collect_column(batch, ranks, [[columns["logprobs"] for columns in rank] for rank in found])

    def ref_logprobs(self, batch: TrainBatch, plan: BatchPlan) -> Tensor:
        """The reference model's, the same way."""
        ranks = plan.passes()
        found = self.policy.ref_logprobs(select_micro_batches(_bare(batch), ranks), self.cfg.rollout.temperature)
        return collect_column(batch, ranks, found)

    def advantages(
        self,
        batch: TrainBatch,
        group_ids: Tensor,
        plan: BatchPlan,
        results: list[RewardResult],
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> dict[str, Any]:
        """Advantages and loss weights of every token; which sequences stay in the update."""
        cfg, segments = self.cfg, batch.segment_ids()
        scores = torch.tensor([result.value for result in results], dtype=torch.float64)
        token_rewards = torch.zeros(batch.num_tokens, dtype=torch.float32)
        last = torch.cumsum(torch.tensor(batch.seq_lens), 0) - 1
        token_rewards[last] = scores.float()
        if cfg.algorithm.use_kl_in_reward:
            assert old_logprobs is not None and ref_logprobs is not None
            kl = KL_ESTIMATORS[cfg.algorithm.kl_penalty](old_logprobs, ref_logprobs)
            token_rewards -= cfg.algorithm.kl_coef * kl * batch.loss_mask
        advantages = ADVANTAGES[cfg.algorithm.adv_estimator](
            AdvantageInputs(token_rewards, batch.loss_mask, segments, group_ids, cfg.algorithm.norm_adv_by_std_in_grpo)
        )
        kept = torch.ones(batch.num_sequences, dtype=torch.bool)
        if cfg.algorithm.drop_flat_groups:
            kept = ~flat_groups(sequence_sums(token_rewards, segments, batch.num_sequences), group_ids)
        minis = (group_ids // cfg.mini_batch_size)[segments]
        weights = torch.zeros(batch.num_tokens)
        for mini in range(int(minis.max()) + 1):
            mask = batch.loss_mask & kept[segments] & (minis == mini)
            weights += loss_weights(
                cfg.actor.loss_agg_mode, mask, segments, batch.num_sequences, cfg.data.max_response_length
            )
        columns = {"advantages": advantages, "loss_weights": weights}
        if self.num_updates > 1:
            assert old_logprobs is not None
            columns["old_logprobs"] = old_logprobs
        if ref_logprobs is not None:
            columns["ref_logprobs"] = ref_logprobs
        return {"train_batch": _bare(batch).with_(**columns), "train_plan": plan.keep(kept), "kept": kept}

    def update(self, train_batch: TrainBatch, train_plan: BatchPlan) -> dict[str, Any]:
        """ppo_epochs passes over the mini-batches, an optimizer step each. A mini-batch without sequences is passed
        over.
        """
        updates: list[UpdateResult] = []
        parts: list[list[Tensor]] = [[] for _ in range(self.cfg.dp_size)]
        for epoch in range(self.cfg.actor.ppo_epochs):
            for ranks in train_plan.minis:
                if not any(micro for rank in ranks for micro in rank):
                    found = [[torch.zeros(0)] * len(rank) for rank in ranks]
                else:
                    results = self.policy.update(select_micro_batches(train_batch, ranks), self.cfg.rollout.temperature)
                    updates.append(results[0])
                    found = [list(result.logprobs) for result in results]
                if epoch == 0:
                    parts = [have + new for have, new in zip(parts, found, strict=True)]
        return {"updates": updates, "train_logprobs": collect_column(train_batch, train_plan.passes(), parts)}

    def publish(self, updates: list[UpdateResult]) -> int:
        """The new weights into the engines, under the next version."""
        self.version += 1
        changed = any(update.report.grad_norm > 0 and update.report.lr > 0 for update in updates)
        return self.policy.publish(self.version, expect_change=changed)

    # Sampling and validation.

    def _sample(
        self, prompts: Sequence[Prompt], n: int, temperature: float, top_p: float, top_k: int, purpose: str
    ) -> list[RolloutGroup]:
        """Prompts dealt out to the engines in turn, and back in order."""
        cfg, engines = self.cfg, self.policy.grid.num_engines
        seeds = [
            random.Random(f"{cfg.trainer.seed}/{purpose}/{i}").getrandbits(32) if cfg.rollout.seed_per_sample else None
            for i in range(len(prompts))
        ]
        requests = [Request(prompt.token_ids, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        sampling = Sampling(
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=cfg.data.max_response_length,
            stop_token_ids=self.renderer.eos_token_ids,
            stop=tuple(cfg.rollout.stop),
        )
        answers = self.policy.generate([requests[e::engines] for e in range(engines)], sampling)
        groups = []
        for i, prompt in enumerate(prompts):
            samples = answers[i % engines][i // engines]
            rollouts = tuple(
                Rollout(s.token_ids, s.logprobs, s.finish_reason, self.renderer.decode(s.token_ids)) for s in samples
            )
            groups.append(RolloutGroup(prompt, rollouts, self.version))
        return groups

    def validate(self, step: int) -> dict[str, float]:
        """Every validation row sampled val.n times and scored once each (contract R4)."""
        if self.val_set is None:
            return {}
        val = self.cfg.rollout.val
        groups = self._sample(self.val_set.prompts, val.n, val.temperature, val.top_p, val.top_k, f"val/{step}")
        return report.validation_metrics(groups, self.reward(groups))

    def finished(self) -> bool:
        """GRPO runs all its steps."""
        return False

    def sample_rollouts(self, count: int) -> list[dict[str, Any]]:
        """The first sample of evenly spread prompts of the last step."""
        groups = self.last_groups
        per_group = len(groups[0].rollouts)
        picked = [i * len(groups) // count for i in range(min(count, len(groups)))]
        return [
            {
                "prompt": groups[i].prompt.text,
                "response": groups[i].rollouts[0].text,
                "ground_truth": groups[i].prompt.ground_truth,
                "reward": self.last_results[i * per_group].value,
                "failed": self.last_results[i * per_group].failed,
                "finish_reason": groups[i].rollouts[0].finish_reason,
                "num_tokens": len(groups[i].rollouts[0].token_ids),
                "weight_version": groups[i].weight_version,
                "data_source": groups[i].prompt.data_source,
            }
            for i in picked
        ]

    def save(self, path: str) -> None:
        """The actor in Hugging Face form."""
        self.policy.save_hf(path)

    def close(self) -> None:
        """End workers and reward processes."""
        self.pool.close()
        self.policy.close()

    def data_summary(self) -> dict[str, PromptSet]:
        """What was read, for the run's first lines."""
        return {"train": self.train_set} | ({"val": self.val_set} if self.val_set else {})


def _bare(batch: TrainBatch) -> TrainBatch:
    """Tokens and mask alone: what a forward pass needs."""
    return TrainBatch(batch.tokens, batch.seq_lens, batch.loss_mask)


def _reward_sample(prompt: Prompt, rollout: Rollout) -> RewardSample:
    return RewardSample(
        data_source=prompt.data_source,
        prompt_text=prompt.text,
        solution_str=rollout.text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        num_tokens=len(rollout.token_ids),
        finish_reason=rollout.finish_reason,
    )
