"""Links between real gloo ranks: measured, and named where an exchange does not end."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import os
import socket
import time

import torch.distributed as dist

from megatron_rl.parallel import link_speed
from megatron_rl.parallel.links import LinkPlan, Measured
from tests.helpers.run_ranks import run_ranks

STORES: list[dist.TCPStore] = []
"""Open until the rank ends."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measured(rank: int, world: int, port: int, silent: int | None) -> Measured:
    """What a rank measures as a node of its own. silent: a rank that takes no part in its first exchange."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    link_speed.EXCHANGE_S = 1.0 if silent is not None else 20.0
    if rank == silent:
        link_speed._best_seconds = lambda start, device: time.sleep(1.2)  # type: ignore[assignment]
    plan = LinkPlan("cpu", world, 1, "127.0.0.1", port)
    if rank == 0:
        STORES.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    result = link_speed.measure(plan)
    if silent is not None:
        dist.destroy_process_group()
        time.sleep(0.5 if rank == 0 else 0.0)  # others still read from its store
        return result
    # The worker's own group comes after, as in a run.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("worker", store), rank=rank, world_size=world)
    return result


def test_each_pair_of_nodes_is_measured_once_and_then_all_together() -> None:
    results = run_ranks(3, measured, free_port(), None)
    assert sorted(link.ranks for one in results for link in one.links) == [(0, 1), (0, 2), (1, 2)]
    for one in results:
        assert one.trouble == "" and one.all_reduce_gbps is not None and one.all_reduce_gbps > 0.1
        assert all(link.kind == "between" and link.gbps is not None and link.gbps > 0.1 for link in one.links)


def test_an_exchange_that_does_not_end_is_named_by_its_ranks_and_no_others() -> None:
    results = run_ranks(4, measured, free_port(), 3)
    broken = {link.ranks for one in results for link in one.links if link.gbps is None}
    assert len(broken) == 1 and 3 in next(iter(broken))
    assert all(one.all_reduce_gbps is None and "did not end" in one.trouble for one in results)
