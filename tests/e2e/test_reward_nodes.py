"""Reward processes on the nodes of a Ray cluster: two raylets on this machine, each a node to Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REWARDS = """
    import os, time

    def behave(sample):
        text = sample.solution_str
        if text == "hang":
            time.sleep(3600)
        if text == "crash":
            os.kill(os.getpid(), 11)
        if text == "raise":
            raise ValueError("no such digit")
        return {"score": float(text), "pool": os.getppid(), "pid": os.getpid()}

    def whole(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(len(solution_strs))] * len(solution_strs)
"""
RUN = """
import json, sys
import psutil
from ray.cluster_utils import Cluster
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.experience.spread_rewards import SpreadPool
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.pool import FailureLimit, RewardRule, TooManyFailed

def samples(*texts):
    return [RewardSample("d", "p", text, None, where=f"row {row}") for row, text in enumerate(texts)]

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes.add_node(num_cpus=1)
# One core each, which the policy takes: reward processes must ask for none.
cluster = ClusterConfig(device="cpu", nnodes=2, ray_address=nodes.address)
cfg = RewardConfig(num_workers=3, timeout_s=2.0, failed_score=-1.0)
rules = [RewardRule(f"{sys.argv[1]}:behave"), RewardRule(f"{sys.argv[1]}:whole", {})]
out = {}
pool = SpreadPool(cluster, cfg, rules)
try:
    texts = [str(number) for number in range(60)]
    texts[10], texts[20], texts[30] = "hang", "crash", "raise"
    results = pool.score(samples(*texts), 0, FailureLimit(3))
    out["values"] = [one.value for one in results]
    out["failed"] = {number: one.failed for number, one in enumerate(results) if one.failed}
    out["pools"] = [int(one.extra.get("pool", 0)) for one in results]
    out["pids"] = sorted({int(one.extra["pid"]) for one in results if not one.failed})
    out["whole"] = [one.value for one in pool.score(samples("a", "b", "c"), 1, None)]
    try:
        pool.score(samples(*["raise"] * 40), 0, FailureLimit(3))
    except TooManyFailed as error:
        out["stopped"] = str(error)
finally:
    pool.close()
out["left"] = [pid for pid in {*out["pids"], *out["pools"]} - {0} if psutil.pid_exists(pid)]
nodes.shutdown()
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(textwrap.dedent(REWARDS))
    done = subprocess.run([sys.executable, "-c", RUN, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_r3_samples_are_dealt_to_the_pools_of_both_nodes_and_fail_alone(out) -> None:
    """R3: what hangs or crashes costs its own sample; results keep their order."""
    bad = {"10": "no result within 2 s", "20": "its process died (signal 11", "30": "no such digit"}
    assert out["values"] == [-1.0 if str(number) in bad else float(number) for number in range(60)]
    assert out["failed"].keys() == bad.keys()
    assert all(reason in out["failed"][number] for number, reason in bad.items())
    pools = [pool for pool in out["pools"] if pool]
    first, second = sorted(set(pools), key=pools.count)
    # Three processes: two on one node, which has two thirds of the samples.
    assert 17 <= pools.count(first) <= 20 and 37 <= pools.count(second) <= 40


def test_a_reward_of_whole_batches_sees_all_samples(out) -> None:
    assert out["whole"] == [3.0, 3.0, 3.0]


def test_scoring_is_given_up_once_too_many_have_failed_and_no_process_is_left(out) -> None:
    assert "samples have failed" in out["stopped"]
    assert out["left"] == []
