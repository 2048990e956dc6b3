"""A run's rewards: reward processes from the start, and the models that score once the policy has its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_rl.algos.filters import overlong_penalty
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import FlowError, RewardError
from megatron_rl.experience.reward_samples import RolloutSamples, reward_sample
from megatron_rl.experience.scoring_models import ScoringModels
from megatron_rl.experience.spread_rewards import SpreadPool
from megatron_rl.rewards.base import RewardResult, number_fault
from megatron_rl.rewards.scorer import RewardScorer, local_pool
from megatron_rl.types import Prompt, Rollouts


class RunRewards:
    """Scores the groups of a run. Close it before the policy: on one Ray, the last to leave shuts it down."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self._models = ScoringModels(cfg)
        self._started: RewardScorer | None = None

    def start(self, spread: bool = True) -> None:
        """Start the reward processes; models start with `start_models`. spread: over the nodes of the run, if it has
        several; else all are on this machine.
        """
        cluster = self._cfg.cluster
        over_nodes = spread and cluster.backend == "ray" and cluster.nnodes > 1
        start_pool = partial(SpreadPool, cluster) if over_nodes else local_pool
        self._started = RewardScorer(self._cfg.reward, models=self._models.functions(), start_pool=start_pool)

    @property
    def _scorer(self) -> RewardScorer:
        if self._started is None:
            raise FlowError("the run has no reward processes yet -- call its trainer's start() first")
        return self._started

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Look at every row's ground truth, and score an empty response to the first prompt of each data source,
        models left out.

        Raises DataError naming data sources and rows that cannot be scored, RewardError where a reward cannot be
        loaded or fails.
        """
        samples = [reward_sample(prompt) for prompt in prompts]
        self._scorer.check_rows(samples)
        self._scorer.preflight(samples)

    def notes(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """By which rule the prompts' data sources are scored, where reward.function does not say it; a line each."""
        return tuple(self._scorer.notes([reward_sample(prompt) for prompt in prompts]))

    def start_models(self) -> None:
        """Start the models that rewards name, after the policy's workers: what those need comes first."""
        self._models.start(self._scorer.plan)

    def score(self, rollouts: Rollouts) -> list[RewardResult]:
        """One result per sequence, group after group. RewardError once too many fail (reward.max_failed_share)."""
        with_ids = self._scorer.plan.uses("model")
        return self._scorer.score_or_stop(RolloutSamples(rollouts, with_ids))

    def close(self) -> None:
        """End the models' workers and the reward processes."""
        try:
            self._models.close()
        finally:
            started, self._started = self._started, None
            if started is not None:
                started.close()


def length_penalties(cfg: RunConfig, response_lens: Tensor) -> Tensor:
    """[S] float64 added to scores for length (algorithm.overlong_buffer); 0 where that is off."""
    buffer = cfg.algorithm.overlong_buffer
    if not buffer.enable:
        return torch.zeros(len(response_lens), dtype=torch.float64)
    return overlong_penalty(response_lens, cfg.data.max_response_length, buffer.len, buffer.penalty_factor)


def scores_of(results: Sequence[RewardResult], penalties: Tensor) -> Tensor:
    """[S] float64: the rewards' values with the penalties [S] for length.

    Raises RewardError if a score is not finite or too large: a node of the user's own may have made it.
    """
    for number, result in enumerate(results):
        fault = number_fault(result.value)
        if fault is not None:
            raise RewardError(
                f"the flow's reward node gave {result.value!r} to sequence {number} of the batch -- {fault}"
            )
    return torch.tensor([result.value for result in results], dtype=torch.float64) + penalties
