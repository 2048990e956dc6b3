"""The reward processes of one node, of a run on several nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.observe.beat import unwatched
from megatron_rl.observe.log import setup_logging
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.compose import Results
from megatron_rl.rewards.pool import FailureLimit, RewardRule, TooManyFailed
from megatron_rl.rewards.scorer import local_pool


def processes_of(total: int, nodes: int) -> list[int]:
    """How many of `total` reward processes each node has; 0 on some if there are more nodes than processes."""
    return [total // nodes + (node < total % nodes) for node in range(nodes)]


@dataclass(frozen=True)
class NodeScores:
    """What a node made of its samples. failed: place of a sample -> why, if so many failed that scoring was given up;
    there are no results then.
    """

    results: Results
    failed: dict[int, str] = field(default_factory=dict[int, str])


class RewardPoolWorker:
    """A RewardPool on each node. Its methods are called on all nodes at once, each with a part of the samples."""

    def __init__(
        self, rank: int, world: int, cfg: RewardConfig, rules: Sequence[RewardRule], path: Sequence[str]
    ) -> None:
        """Start this node's share of reward.num_workers. path: the controller's sys.path: rewards are found there."""
        setup_logging("rewards", rank)
        sys.path += [folder for folder in path if folder not in sys.path]
        count = processes_of(cfg.num_workers, world)[rank]
        self._pool = local_pool(replace(cfg, num_workers=count), rules) if count else None

    def takes_batch(self, reward: int) -> bool:
        """See RewardPool.takes_batch; False on a node without processes."""
        return self._pool is not None and self._pool.takes_batch(reward)

    def score(self, samples: Sequence[RewardSample], reward: int, may_fail: int | None) -> NodeScores:
        """See RewardPool.score. may_fail: how many samples may fail before scoring is given up."""
        if self._pool is None or not samples:
            return NodeScores([])
        limit = None if may_fail is None else FailureLimit(may_fail)
        try:
            # The pool has time limits of its own, for each sample.
            with unwatched(f"rewards of {len(samples)} samples"):
                return NodeScores(self._pool.score(samples, reward, limit))
        except TooManyFailed:
            assert limit is not None, "given up without a limit"
            return NodeScores([], limit.reasons)

    def close(self) -> None:
        """End this node's processes."""
        if self._pool is not None:
            self._pool.close()
