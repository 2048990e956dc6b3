"""PPO with a critic (Schulman et al. 2017), read top to bottom: one step is the flow that `ppo` lists.

    prompts -> generate -> assemble -> (reward || old_logprobs || ref_logprobs || values) -> advantages
            -> (update_critic || update) -> publish

With critic.share_backbone one forward pass (both_heads) gives values and old_logprobs, and one update trains both. A
critic replaced by a constant or by a function of one's own is one line: `trainer.flow.replace("values",
constant(0.0))`. Step functions that any algorithm has are in experience/ and learning/.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.data.batching import BatchPlan
from megatron_rl.experience.scoring import length_penalties, scores_of
from megatron_rl.flow import Flow, Node, absent, node
from megatron_rl.flow.node import Absent
from megatron_rl.learning import credit, passes
from megatron_rl.learning.batch import Batch, OnRanks
from megatron_rl.learning.passes import Assembled, LossColumns, Made, Models, load_rollouts
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import Prompt, Rollouts
from megatron_rl.workers.objectives import ValueObjective
from megatron_rl.workers.records import UpdateResult


def ppo(parts: Parts) -> Flow:
    """The flow of one step."""
    cfg, models, sampler = parts.cfg, parts.models, parts.sampler
    own_critic = node(update_critic, models, gives="critic_updates", group="critic")
    nodes = [
        node(sampler.generate, gives="rollouts", group="policy"),
        node(assemble, models, group="policy"),
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
class PpoBatch(Assembled):
    """The batch of a step, with the critic's own plan."""

    critic_plan: BatchPlan


@dataclass(frozen=True)
class BothHeads:
    """Log-probabilities and values of one forward pass."""

    old_logprobs: OnRanks
    head_values: OnRanks


@dataclass(frozen=True)
class PpoInputs(credit.TrainInputs):
    """What the updates of actor and critic take."""

    critic_columns: LossColumns
    """the columns of the critic's loss"""
    value_metrics: dict[str, float]
    """how well the values foresaw the returns"""


def assemble(models: Models, rollouts: Rollouts) -> PpoBatch:
    """Plan the actor's mini-batches and the critic's, and have the ranks fetch their sequences."""
    cfg = models.cfg
    batch, (plan, critic_plan) = load_rollouts(models, rollouts, [cfg.actor_training, cfg.critic_training])
    return PpoBatch(batch, plan, critic_plan)


def values(models: Models, batch: Batch, critic_plan: BatchPlan) -> OnRanks:
    """The critic's value of the state that each sampled token was chosen in."""
    models.forward(critic_plan, "critic", {"values": "values"})
    return OnRanks("values")


def both_heads(models: Models, batch: Batch, plan: BatchPlan) -> BothHeads:
    """One forward pass of the shared transformer."""
    models.forward(plan, "actor", {"logprobs": "old_logprobs", "values": "values"})
    return BothHeads(OnRanks("old_logprobs"), OnRanks("values"))


def head_to_values(head_values: OnRanks) -> OnRanks:
    """A node of its own, which `replace` can change: old_logprobs come from the same pass."""
    return head_values


def advantages(
    parts: Parts,
    batch: Batch,
    plan: BatchPlan,
    results: list[RewardResult],
    values: Made,
    old_logprobs: Made | None = None,
    ref_logprobs: Made | None = None,
) -> PpoInputs:
    """GAE's advantages and returns of every token, whitened over the step; loss weights of actor and critic."""
    cfg, models = parts.cfg, parts.models
    models.put(batch, "values", values)
    penalties = length_penalties(cfg, batch.response_lens)
    scores = scores_of(results, penalties)
    returns = credit.returns_of(models, parts.kl_control, batch, scores, old_logprobs, ref_logprobs)
    report, counts = credit.assign_credit(models, batch, returns, penalties)
    return PpoInputs(
        plan.keep(report.kept),
        credit.loss_columns(cfg),
        report.kept,
        counts,
        critic_columns={**credit.VALUE_COLUMNS, "loss_weights": "critic_weights"},
        value_metrics=report.value_metrics,
    )


def update_critic(
    models: Models, batch: Batch, critic_plan: BatchPlan, critic_columns: LossColumns
) -> list[UpdateResult]:
    """ppo_epochs passes of the critic over its mini-batches, an optimizer step each."""
    cfg = models.cfg
    objective = ValueObjective(cfg.critic.cliprange_value)
    epochs = cfg.critic_training.epochs
    return passes.run_updates(models, batch, critic_plan, epochs, "critic", objective, critic_columns)
