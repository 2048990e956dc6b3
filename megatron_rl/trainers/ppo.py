"""PPO with a critic (Schulman et al. 2017), read top to bottom: one step is the flow that `ppo` lists.

    prompts -> generate -> assemble -> (reward || old_logprobs || ref_logprobs || values) -> advantages
            -> (update_critic || update) -> publish

With critic.share_backbone one forward pass (both_heads) gives values and old_logprobs, and one update trains both. A
critic replaced by a constant or by a function of one's own is one line: `trainer.flow.replace("values",
constant(0.0))`. Step functions that any algorithm has are in experience/ and learning/.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.experience.scoring import length_penalties, scores_of
from megatron_rl.flow import Flow, Node, absent, node
from megatron_rl.flow.node import Absent
from megatron_rl.learning import credit, passes
from megatron_rl.learning.passes import Models, bare
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import Prompt, RolloutGroup, TrainBatch
from megatron_rl.workers.objectives import ValueObjective
from megatron_rl.workers.records import Read, UpdateResult


def ppo(parts: Parts) -> Flow:
    """The flow of one step."""
    cfg, models, sampler = parts.cfg, parts.models, parts.sampler
    own_critic = node(update_critic, models, gives="critic_updates", group="critic")
    nodes = [
        node(sampler.generate, gives="groups", group="policy"),
        node(assemble, cfg),
        node(parts.rewards.score, name="reward", gives="results", group="reward"),
        *_passes(models),
        node(passes.ref_logprobs, models, group="policy") if cfg.needs_reference else absent("ref_logprobs"),
        node(advantages, parts),
        absent("critic_updates") if cfg.critic.share_backbone else own_critic,
        node(passes.update, models, group="policy"),
        node(sampler.publish, gives="sync", group="policy"),
    ]
    return Flow(nodes, sources={"prompts": list[Prompt], "step": int})


def _passes(models: Models) -> list[Node | Absent]:
    """Of actor and critic: one for both if they share a transformer."""
    if models.cfg.critic.share_backbone:
        return [node(both_heads, models, group="policy"), node(head_to_values, name="values", gives="values")]
    needs_old = passes.needs_old_logprobs(models.cfg)
    old = node(passes.old_logprobs, models, group="policy") if needs_old else absent("old_logprobs")
    return [old, node(values, models, group="critic")]


@dataclass(frozen=True)
class PpoBatch(passes.Assembled):
    """The rollouts of a step, with the critic's own plan."""

    critic_plan: BatchPlan


@dataclass(frozen=True)
class BothHeads:
    """Log-probabilities and values [T] of one forward pass."""

    old_logprobs: Tensor
    head_values: Tensor


@dataclass(frozen=True)
class PpoInputs(credit.TrainInputs):
    """What the updates of actor and critic take."""

    critic_batch: TrainBatch
    """with old_values, returns and the critic's loss_weights"""
    seen_values: Tensor
    returns: Tensor


def assemble(cfg: RunConfig, groups: list[RolloutGroup]) -> PpoBatch:
    """Pack the rollouts; plan the actor's mini-batches and the critic's."""
    actor = passes.assemble(cfg, groups)
    minis = (actor.group_ids // cfg.critic_training.mini_batch_size).tolist()
    critic_plan = passes.plan_for(cfg, actor.batch.seq_lens, minis, cfg.critic_training)
    return PpoBatch(actor.batch, actor.group_ids, actor.plan, critic_plan)


def values(models: Models, batch: TrainBatch, critic_plan: BatchPlan) -> Tensor:
    """[T] the critic's value of the state that each sampled token was chosen in."""
    return passes.forward(models, batch, critic_plan, "critic", Read(("values",)))["values"]


def both_heads(models: Models, batch: TrainBatch, plan: BatchPlan) -> BothHeads:
    """One forward pass of the shared transformer."""
    read = Read(("logprobs", "values"), models.cfg.rollout.temperature)
    columns = passes.forward(models, batch, plan, "actor", read)
    return BothHeads(columns["logprobs"], columns["values"])


def head_to_values(head_values: Tensor) -> Tensor:
    """A node of its own, which `replace` can change: old_logprobs come from the same pass."""
    return head_values


def advantages(
    parts: Parts,
    batch: TrainBatch,
    group_ids: Tensor,
    plan: BatchPlan,
    groups: list[RolloutGroup],
    results: list[RewardResult],
    values: Tensor | float,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> PpoInputs:
    """GAE's advantages and returns of every token, whitened over the step; loss weights of actor and critic."""
    cfg, mask = parts.cfg, batch.loss_mask
    values = torch.as_tensor(values, dtype=torch.float32).expand(batch.num_tokens) * mask
    penalties = length_penalties(cfg, credit.response_lens(batch))
    scores = scores_of(results, penalties)
    rewards = credit.token_rewards(cfg, parts.kl_control, batch, scores, old_logprobs, ref_logprobs)
    credits = credit.credit(cfg.algorithm.adv_estimator, batch, group_ids, rewards, values=values)
    assert credits.returns is not None, cfg.algorithm.adv_estimator
    # The actor leaves out what it may not learn from; the critic's targets hold for every sampled token.
    nothing = torch.zeros(batch.num_sequences, dtype=torch.bool)
    selection = credit.select_tokens(cfg, batch, groups, nothing, penalties, old_logprobs)
    actor = credit.train_inputs(cfg, batch, group_ids, plan, selection, credits.advantages, old_logprobs, ref_logprobs)
    targets = {"old_values": values, "returns": credits.returns}
    weights = credit.mini_batch_weights(cfg, batch, group_ids, mask, cfg.critic_training)
    return PpoInputs(
        actor.train_batch.with_(**targets) if cfg.critic.share_backbone else actor.train_batch,
        actor.train_plan,
        actor.kept,
        actor.counts,
        critic_batch=bare(batch).with_(**targets, loss_weights=weights),
        seen_values=values,
        returns=credits.returns,
    )


def update_critic(
    models: Models, critic_batch: TrainBatch, critic_plan: BatchPlan, groups: list[RolloutGroup]
) -> list[UpdateResult]:
    """ppo_epochs passes of the critic over its mini-batches, an optimizer step each."""
    epochs, rows = models.cfg.critic_training.epochs, passes.sequence_names(groups)
    objective = ValueObjective(models.cfg.critic.cliprange_value)
    return passes.run_updates(models, "critic", objective, critic_batch, critic_plan, epochs, rows)[0]
