"""Engine answers as tests make and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.cluster.handles import InProcess
from megatron_rl.types import EngineAnswer, Rollout, RolloutGroup, Rollouts, Samples, Texts, TrainBatch
from megatron_rl.workers.rank_batch import end_to_end


def by_request(samples: Samples, n: int = 1) -> list[list[Rollout]]:
    """The n samples of each request, without text."""
    rows = [samples.rollout(row, "") for row in range(len(samples))]
    return [rows[first : first + n] for first in range(0, len(rows), n)]


def batch_of(rollouts: Rollouts) -> TrainBatch:
    """All sequences of a step, as ranks would have them."""
    refs = rollouts.refs(range(rollouts.num_sequences))
    return end_to_end(refs.prompts, refs.prompt_of.tolist(), *refs.fetch())


def rollouts_of(groups: Sequence[RolloutGroup], num_parts: int = 1) -> Rollouts:
    """What a controller would hold if `num_parts` engines had answered these groups, of equal size."""
    answers: list[EngineAnswer] = []
    for part in range(num_parts):
        made = [(group, rollout) for group in groups[part::num_parts] for rollout in group.rollouts]
        rollouts = [rollout for _, rollout in made]
        samples = Samples.from_lists(
            [rollout.token_ids for rollout in rollouts],
            [rollout.logprobs for rollout in rollouts],
            [rollout.finish_reason for rollout in rollouts],
            0,
        )
        versions = np.array([group.weight_version for group, _ in made], np.int32)
        samples = replace(samples, oldest_version=versions, newest_version=versions)
        texts = Texts.of([rollout.text for rollout in rollouts])
        answers.append(EngineAnswer.of(samples, InProcess(samples), InProcess(texts)))
    return Rollouts.from_answers([group.prompt for group in groups], len(groups[0].rollouts), answers)
