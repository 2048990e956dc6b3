"""The reward processes of one of several nodes; tests/e2e/test_reward_nodes.py has two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.pool import RewardRule
from megatron_rl.workers.reward_pool import NodeScores, RewardPoolWorker, processes_of


@pytest.mark.parametrize(("total", "shares"), [(8, [3, 3, 2]), (3, [1, 1, 1]), (2, [1, 1, 0])])
def test_processes_are_shared_evenly_between_nodes(total: int, shares: list[int]) -> None:
    assert processes_of(total, 3) == shares


def _samples(*texts: str) -> list[RewardSample]:
    return [RewardSample("d", "p", text, None) for text in texts]


def test_a_node_scores_its_part_and_gives_up_once_too_many_failed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(sample):\n    return float(sample.solution_str)\n")
    cfg = RewardConfig(num_workers=3, failed_score=-1.0)
    worker = RewardPoolWorker(1, 2, cfg, [RewardRule(f"{file}:score")], [])
    try:
        assert not worker.takes_batch(0)
        node = worker.score(_samples("1", "x", "2"), 0, 1)
        assert [result and result.value for result in node.results] == [1.0, -1.0, 2.0] and node.failed == {}
        node = worker.score(_samples(*["1", "x"] * 100), 0, 1)
        assert node.results == [] and len(node.failed) > 1 and all(number % 2 for number in node.failed)
        assert "could not convert" in next(iter(node.failed.values()))
        assert worker.score([], 0, None) == NodeScores([])
    finally:
        worker.close()


def test_a_node_without_processes_scores_nothing() -> None:
    worker = RewardPoolWorker(2, 3, RewardConfig(num_workers=2), [RewardRule("exact_match")], [])
    assert not worker.takes_batch(0) and worker.score([], 0, None) == NodeScores([])
    worker.close()
