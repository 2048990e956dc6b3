"""Reward processes on all nodes of a run: a pool of its share on each (workers/reward_pool.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.worker_group import start_group
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.rewards.base import RewardResult, RewardSample, number_of
from megatron_rl.rewards.compose import Results
from megatron_rl.rewards.pool import FailureLimit, RewardRule, TooManyFailed
from megatron_rl.workers.reward_pool import NodeScores, RewardPoolWorker, processes_of

PROCESS_SAMPLES = 512
"""Most samples of a call for each process: their texts are in memory here, and travel, at that time."""


class SpreadPool:
    """reward.num_workers processes over cluster.nnodes nodes. A node that dies ends the call with a ClusterError; a
    sample whose reward hangs, crashes or is killed fails alone, as on one machine.
    """

    def __init__(self, cluster: ClusterConfig, cfg: RewardConfig, rules: Sequence[RewardRule]) -> None:
        """Start the pools; they take none of Ray's CPUs. Raises ClusterError as start_group does."""
        nodes = cluster.nnodes
        counts = processes_of(cfg.num_workers, nodes)
        # The node of each process, one of each node in turn: neighbouring samples, which take alike, are dealt out.
        self._node_of = [node for turn in range(max(counts)) for node in range(nodes) if turn < counts[node]]
        self._takes_batch: dict[int, bool] = {}
        own = replace(cluster, n_gpus_per_node=1)
        args = cfg, tuple(rules), tuple(sys.path)
        self._group = start_group(RewardPoolWorker, args, own, RankGrid.flat(nodes), "cpu", takes_cpus=False)

    def score(self, samples: Sequence[RewardSample], reward: int, limit: FailureLimit | None) -> Results:
        """See RewardPool.score. Samples are dealt to the nodes by their number of processes; a reward that takes whole
        batches has all samples on the first node.
        """
        if reward not in self._takes_batch:
            self._takes_batch[reward] = any(self._group.all(RewardPoolWorker.takes_batch, reward))
        whole = self._takes_batch[reward]
        results: list[RewardResult | None] = [None] * len(samples)
        step = max(1, len(samples) if whole else PROCESS_SAMPLES * len(self._node_of))
        for first in range(0, len(samples), step):
            places: list[list[int]] = [[] for _ in range(self._group.grid.world)]
            for place in range(first, min(first + step, len(samples))):
                places[0 if whole else self._node_of[place % len(self._node_of)]].append(place)
            self._score_some(samples, places, reward, limit, results)
        return results

    def _score_some(
        self,
        samples: Sequence[RewardSample],
        places: Sequence[Sequence[int]],
        reward: int,
        limit: FailureLimit | None,
        results: list[RewardResult | None],
    ) -> None:
        """places: of the samples of each node."""
        may_fail = None if limit is None else limit.left
        parts = _read(samples, places)
        scored: list[NodeScores] = self._group.each_dp(RewardPoolWorker.score, parts, reward, may_fail)
        for of_node, node in zip(places, scored, strict=True):
            failed = {of_node[number]: reason for number, reason in node.failed.items()}
            if not failed:
                for place, result in zip(of_node, node.results, strict=True):
                    results[place] = result
                    if result is not None and result.failed is not None:
                        failed[place] = result.failed
            if limit is not None:
                for place, reason in failed.items():
                    limit.note(number_of(samples, place), samples[place], reason)
        if limit is not None and limit.is_passed:
            raise TooManyFailed(f"{len(limit.failed)} samples have failed")

    def close(self) -> None:
        """End the processes of all nodes."""
        self._group.close()


def _read(samples: Sequence[RewardSample], places: Sequence[Sequence[int]]) -> list[list[RewardSample]]:
    """The samples of each node. They are read in their order, which is how they lie in memory."""
    owner = {place: node for node, of_node in enumerate(places) for place in of_node}
    parts: list[list[RewardSample]] = [[] for _ in places]
    for place in sorted(owner):
        # Token ids are for reward models; a rule has the text.
        parts[owner[place]].append(replace(samples[place], prompt_ids=(), response_ids=()))
    return parts
