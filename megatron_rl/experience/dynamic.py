"""DAPO's dynamic sampling (Yu et al. 2025): further prompts in place of groups whose samples all score the same.

Bounded: a step samples at most max_num_gen_batches batches of prompts. Resumable: nothing is carried from one step to
the next but the position in the data, which a checkpoint holds anyway; what a step does not use, it counts and drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algos.filters import differing_groups
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import RewardError
from megatron_rl.experience.sampler import Sampler
from megatron_rl.experience.scoring import RunRewards, length_penalties
from megatron_rl.rewards.base import RewardResult
from megatron_rl.types import Prompt, Rollouts


@dataclass(frozen=True)
class Sampled:
    """The groups of one step, what each of their samples scored (group after group), and counts for the metrics."""

    rollouts: Rollouts
    results: list[RewardResult]
    sampling: dict[str, float]


def generate_differing(
    cfg: RunConfig,
    sampler: Sampler,
    rewards: RunRewards,
    more: Callable[[], list[Prompt]],
    prompts: list[Prompt],
    step: int,
) -> Sampled:
    """Groups whose samples differ, from as many batches of prompts as that takes (DAPO). more: the next batch."""
    filters = cfg.algorithm.filter_groups

    def score(batch: list[Prompt], number: int) -> tuple[Rollouts, list[RewardResult]]:
        rollouts = sampler.training_samples(batch, step, first=number * cfg.data.train_batch_size)
        return rollouts, rewards.score(rollouts)

    def differs(rollouts: Rollouts, results: Sequence[RewardResult]) -> list[bool]:
        penalties = length_penalties(cfg, torch.tensor(rollouts.lens))
        return differing(filters.metric, results, penalties, cfg.rollout.n)

    return sample_differing(prompts, more, score, differs, max_batches=filters.max_num_gen_batches)


def sample_differing(
    first: list[Prompt],
    more: Callable[[], list[Prompt]],
    score: Callable[[list[Prompt], int], tuple[Rollouts, list[RewardResult]]],
    differs: Callable[[Rollouts, Sequence[RewardResult]], list[bool]],
    *,
    max_batches: int,
) -> Sampled:
    """len(first) groups whose samples differ, from at most max_batches batches of prompts.

    more: the next batch of prompts. score: samples and scores prompts, given the batch's number from 0. differs: for
    each group, whether it is wanted. If too few groups differ, others fill the step up, so that it always has the same
    shape; the trainer leaves those out of the update.
    """
    wanted = len(first)
    drawn: list[Rollouts] = []
    results: list[RewardResult] = []
    good: list[int] = []
    flat: list[int] = []
    batches, prompts = 0, first
    while True:
        rollouts, scored = score(prompts, batches)
        batches += 1
        for number, keeps in enumerate(differs(rollouts, scored), start=len(good) + len(flat)):
            (good if keeps else flat).append(number)
        drawn.append(rollouts)
        results += scored
        if len(good) >= wanted or batches == max_batches:
            break
        prompts = more()
    filled = max(0, wanted - len(good))
    picked = good[:wanted] + flat[:filled]
    counts = {
        "sampling/batches": batches,
        "sampling/prompts": len(good) + len(flat),
        "sampling/flat": len(flat) - filled,
        "sampling/surplus": max(0, len(good) - wanted),
        "sampling/filled": filled,
    }
    n = drawn[0].n
    return Sampled(
        Rollouts.concat(drawn).select(picked),
        [result for group in picked for result in results[group * n : (group + 1) * n]],
        {name: float(count) for name, count in counts.items()},
    )


def filter_values(metric: str, results: Sequence[RewardResult], penalties: torch.Tensor) -> torch.Tensor:
    """[S] float64: what must differ within a group. penalties: [S] added to the scores for length.

    metric: score or acc (the reward's value; acc its field of that name, if it has one), seq_reward (with penalty), or
    a field of the reward's dict. Raises RewardError where a sample has no such field.
    """
    if metric == "seq_reward":
        return torch.tensor([result.value for result in results], dtype=torch.float64) + penalties
    values: list[float] = []
    for result in results:
        if metric in result.extra:
            values.append(result.extra[metric])
        elif metric in ("score", "acc") or result.failed is not None:
            values.append(result.value)
        else:
            fields = ", ".join(["score", "seq_reward", *sorted(result.extra)])
            raise RewardError(
                f"algorithm.filter_groups.metric {metric!r}: the reward's result has no such field -- known: {fields}"
            )
    return torch.tensor(values, dtype=torch.float64)


def differing(metric: str, results: Sequence[RewardResult], penalties: torch.Tensor, group_size: int) -> list[bool]:
    """Of each group, whether `metric` differs within it."""
    return differing_groups(filter_values(metric, results, penalties), group_size)
