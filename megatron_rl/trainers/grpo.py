"""GRPO (Shao et al. 2024) and its relatives, read top to bottom: one step is the flow that `grpo` lists.

    prompts -> generate -> assemble -> (reward || old_logprobs || ref_logprobs) -> advantages -> update -> publish

The flow is the program: `trainer.flow.describe()` prints it, `trainer.flow.replace("reward", fn)` changes it. A step
function names the values that it takes as its parameters. What one computes is in experience/ and learning/, the
mathematics in algos/, where it runs in workers/.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algos.groups import flat_groups
from megatron_rl.data.batching import BatchPlan
from megatron_rl.experience.dynamic import differing, generate_differing
from megatron_rl.experience.scoring import length_penalties, scores_of
from megatron_rl.flow import Flow, Node, absent, node
from megatron_rl.flow.node import Absent
from megatron_rl.learning import credit, passes
from megatron_rl.learning.batch import Batch
from megatron_rl.learning.passes import Assembled, Made, Models, load_rollouts
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import Prompt, Rollouts


def grpo(parts: Parts) -> Flow:
    """The flow of one step."""
    cfg, models = parts.cfg, parts.models
    needs_old = passes.needs_old_logprobs(cfg)
    nodes = [
        *_sampling(parts),
        node(passes.old_logprobs, models, group="policy") if needs_old else absent("old_logprobs"),
        node(passes.ref_logprobs, models, group="policy") if cfg.needs_reference else absent("ref_logprobs"),
        node(advantages, parts),
        node(passes.update, models, group="policy"),
        node(parts.sampler.publish, gives="sync", group="policy"),
    ]
    return Flow(nodes, sources={"prompts": list[Prompt], "step": int})


def _sampling(parts: Parts) -> list[Node | Absent]:
    """Groups, their scores and the batch. Dynamic sampling samples and scores in turns, in one node."""
    cfg, models, sampler, rewards = parts.cfg, parts.models, parts.sampler, parts.rewards
    if cfg.algorithm.filter_groups.enable:
        turns = (cfg, sampler, rewards, parts.prompts.next)
        nodes = [node(generate_differing, *turns, name="generate", group="policy")]
    else:
        nodes = [
            node(sampler.generate, gives="rollouts", group="policy"),
            node(rewards.score, name="reward", gives="results", group="reward"),
            absent("sampling"),
        ]
    if not cfg.algorithm.adv_estimator.needs_greedy:
        return [*nodes, absent("greedy"), node(assemble, models, group="policy"), absent("baselines")]
    return [
        *nodes,
        node(sampler.greedy, gives="greedy", group="policy"),
        node(assemble, models, group="policy"),
        node(baselines, parts, group="reward"),
    ]


def assemble(models: Models, rollouts: Rollouts, greedy: Rollouts | None = None) -> Assembled:
    """Plan which sequence goes to which mini-batch, rank and micro-batch, and have the ranks fetch their own.

    greedy: waited for, if the step samples them, and not used: the engine gives its memory up to the first model pass.
    """
    batch, (plan,) = load_rollouts(models, rollouts, [models.cfg.actor_training])
    return Assembled(batch, plan)


def baselines(parts: Parts, greedy: Rollouts) -> Tensor:
    """[G] what the greedy responses score."""
    lens = torch.from_numpy(greedy.lens)
    return scores_of(parts.rewards.score(greedy), length_penalties(parts.cfg, lens))


def advantages(
    parts: Parts,
    batch: Batch,
    plan: BatchPlan,
    results: list[RewardResult],
    old_logprobs: Made | None = None,
    ref_logprobs: Made | None = None,
    baselines: Tensor | None = None,
) -> credit.TrainInputs:
    """Advantages and loss weights of every token; which sequences stay in the update."""
    cfg, algorithm, models = parts.cfg, parts.cfg.algorithm, parts.models
    penalties = length_penalties(cfg, batch.response_lens)
    scores = scores_of(results, penalties)
    returns = credit.returns_of(models, parts.kl_control, batch, scores, old_logprobs, ref_logprobs)
    dropped = torch.zeros(batch.num_sequences, dtype=torch.bool)
    if algorithm.drop_flat_groups:
        dropped = flat_groups(returns.returns, batch.group_ids)
    if algorithm.filter_groups.enable:
        differ = differing(algorithm.filter_groups.metric, results, penalties, cfg.rollout.n)
        dropped |= ~torch.tensor(differ)[batch.group_ids]
    report, counts = credit.assign_credit(models, batch, returns, penalties, dropped, baselines)
    return credit.TrainInputs(plan.keep(report.kept), credit.loss_columns(cfg), report.kept, counts)
