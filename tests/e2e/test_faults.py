"""Faults of real processes on a real Ray: each is named with rank, host, what it was at and its last log line, in time.

Ranks are killed, stopped and hung; nodes are second raylets of this machine.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed

from megatron_rl.cluster import ray_runtime, ray_wait
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.ray_backend import RayBackend
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import OutOfMemory, RankDied, RankHung
from megatron_rl.observe.beat import beat
from megatron_rl.observe.log import setup_logging

ROOT = Path(__file__).parents[2]
QUIET_S = 2.0
GRID = RankGrid.flat(2)
HOST = os.uname().nodename


def two_ranks(**changes) -> ClusterConfig:
    return ClusterConfig(device="cpu", n_gpus_per_node=2, num_cpus_per_rank=0.5, hang_timeout_s=QUIET_S, **changes)


class Worker:
    """Two ranks that meet in a collective, unless one of them does something else."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        setup_logging("policy", rank)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)

    def meet(self) -> None:
        torch.distributed.all_reduce(torch.zeros(1))

    def sleep(self, rank: int) -> None:
        logging.getLogger("worker").info("rank %d begins", self.rank)
        beat("micro-batch 1 of 2")
        if self.rank == rank:
            time.sleep(600)
        self.meet()

    def signal(self, rank: int, number: int) -> None:
        logging.getLogger("worker").info("rank %d begins", self.rank)
        beat("micro-batch 1 of 2")
        time.sleep(1.0)  # a Sign is written after half a second
        if self.rank == rank:
            os.kill(os.getpid(), number)
        self.meet()

    def work_long(self, rank: int) -> None:
        if self.rank == rank:
            for number in range(int(2.5 * QUIET_S / 0.1)):
                beat(f"piece {number}")
                time.sleep(0.1)
        self.meet()

    def allocate(self) -> None:
        beat("micro-batch 1 of 2")
        torch.zeros(1 << 50)


LOST_NODE = """
import threading, time, psutil
from ray.cluster_utils import Cluster
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.worker_group import start_group
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import NodeLost
from tests.e2e.test_faults import Worker

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes.add_node(num_cpus=1)
cluster = ClusterConfig(device="cpu", nnodes=2, ray_address=nodes.address)
with start_group(Worker, (), cluster, RankGrid.flat(2), "cpu") as group:
    group.all(Worker.meet)
    theirs = psutil.Process(group.backend.pids[1]).ppid()
    threading.Timer(2.0, psutil.Process(theirs).kill).start()
    try:
        group.all(Worker.sleep, 1)
    except NodeLost as error:
        print("NodeLost", error)
    pids = group.backend.pids
# Those of the lost node end by themselves, once they see that their raylet is gone.
end = time.monotonic() + 30.0
while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
    time.sleep(0.1)
if not any(psutil.pid_exists(pid) for pid in pids):
    print("no rank is left")
nodes.shutdown()
"""


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_wait, "GRACE_S", 1.0)
        ray_runtime.acquire(two_ranks(), "cpu")
        yield
        ray_runtime.release()


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    with start_group(Worker, (), two_ranks(), GRID, "cpu") as group:
        yield group
    assert not any(psutil.pid_exists(pid) for pid in pids_of(group))


def pids_of(group: WorkerGroup) -> list[int]:
    assert isinstance(group.backend, RayBackend)
    return group.backend.pids


def test_r7_a_hung_rank_is_named_with_its_place_and_long_work_is_no_hang(group: WorkerGroup):
    """R7: well before the deadline of the call, and with the rank that the others wait for."""
    with pytest.raises(OutOfMemory, match=rf"rank \d \({HOST}\), allocate, after 'micro-batch 1 of 2'"):
        group.all(Worker.allocate)
    group.all(Worker.work_long, 1)
    start = time.monotonic()
    with pytest.raises(RankHung) as caught:
        group.all(Worker.sleep, 1)
    assert QUIET_S <= time.monotonic() - start < QUIET_S + 5.0
    text, (_, pid) = str(caught.value), pids_of(group)
    assert "Worker.sleep: ranks 0-1 of 2 gave no sign of progress for 2 s" in text and "cluster.hang_timeout_s" in text
    assert "last call that ended: work_long" in text
    assert "the likely cause: rank 1, which is not in the collective that rank 0 waits in" in text
    assert f"rank 1 ({HOST}, process {pid}): for 2 s since 'micro-batch 1 of 2'" in text
    assert "INFO worker: rank 1 begins" in text and "time.sleep(600)" in text and "in all_reduce: work.wait()" in text
    assert "other threads of rank 1:\nthread " in text


def test_a_stopped_process_is_named(group: WorkerGroup):
    start = time.monotonic()
    with pytest.raises(RankHung) as caught:
        group.all(Worker.signal, 1, int(signal.SIGSTOP))
    assert time.monotonic() - start < QUIET_S + 6.0
    text, (_, pid) = str(caught.value), pids_of(group)
    assert f"rank 1 ({HOST}, process {pid}) gives no sign: its process is stopped by a signal (SIGSTOP)" in text
    assert "it was last at 'micro-batch 1 of 2'" in text and "INFO worker: rank 1 begins" in text


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "INFO worker: rank 1 begins"),
        pytest.param(signal.SIGSEGV, "SIGSEGV received", marks=pytest.mark.slow),
    ],
)
def test_a_dead_rank_is_named(group: WorkerGroup, number: signal.Signals, said: str):
    start, (_, pid) = time.monotonic(), pids_of(group)
    with pytest.raises(RankDied) as caught:
        group.all(Worker.signal, 1, int(number))
    assert time.monotonic() - start < 10.0
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"Worker.signal: rank 1 died ({HOST}, process {pid}, after 'micro-batch 1 of 2'): ")
    assert "killed by a signal, or crashed; the kernel has counted no kill for memory there" in first and said in first
    assert all("rank 0 failed: P2PError" in line for line in others if "rank 0" in line)


@pytest.mark.slow
def test_a_lost_node_is_named_with_its_ranks():
    """Its raylet is killed; the processes of its ranks live on until they are ended with the group."""
    done = subprocess.run([sys.executable, "-c", LOST_NODE], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert f"NodeLost Worker.sleep: node {HOST} (" in done.stdout and "is lost, with rank 1: " in done.stdout, done
    assert "rank 1 was last at 'micro-batch 1 of 2'; its last log line: " in done.stdout
    assert "no rank is left" in done.stdout
