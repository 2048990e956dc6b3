"""Waits until a Ray cluster has its nodes and GPUs. Needs no Ray on this machine: it asks the head's directory (GCS).

python -m megatron_rl.cluster.readiness ADDRESS NODES GPUS SECONDS
    python -m megatron_rl.cluster.readiness ADDRESS      asks once, and fails if no Ray answers
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.cluster.addresses import split_address
from megatron_rl.errors import ClusterError

POLL_S = 1.0


@dataclass(frozen=True)
class LiveNode:
    """A node that the head counts as alive."""

    ip: str
    hostname: str
    cpus: float
    gpus: float


def ask_nodes(address: str) -> list[LiveNode]:
    """The live nodes of the Ray cluster whose head is at host:port; none while its first node joins.

    The library ends the process that asks in vain: ask from a process that may end.
    """
    import ray  # noqa: F401  (its libraries are loaded in this order only)
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.exceptions import AuthenticationError

    try:
        client = GcsClient(address=address)
    except AuthenticationError:
        if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            raise
        client = GcsClient(address=address)
        print("[wait] with the token of this user", flush=True)
    return [
        LiveNode(
            node.node_manager_address,
            node.node_manager_hostname,
            node.resources_total.get("CPU", 0.0),
            node.resources_total.get("GPU", 0.0),
        )
        for node in client.get_all_node_info(timeout=10).values()
        if node.state == 0
    ]


def missing(nodes: Sequence[LiveNode], num_nodes: int, num_gpus: float) -> str | None:
    """What a cluster still lacks, in words; None if it is complete."""
    gpus = sum(node.gpus for node in nodes)
    if len(nodes) >= num_nodes and gpus >= num_gpus:
        return None
    return f"{len(nodes)} of {num_nodes} nodes, {gpus:g} of {num_gpus:g} GPUs"


def wait_until_ready(
    address: str, num_nodes: int, num_gpus: float, timeout_s: float, say: Callable[[str], None]
) -> list[LiveNode]:
    """The nodes, once there are so many with so many GPUs in all. ClusterError after timeout_s seconds."""
    host, port = split_address(address)
    start, state, last = time.monotonic(), "no answer", ""
    nodes: list[LiveNode] = []
    while True:
        if _listens(host, port):
            nodes = ask_nodes(address)
            lacking = missing(nodes, num_nodes, num_gpus)
            if lacking is None:
                return nodes
            state = lacking
        seconds = time.monotonic() - start
        if seconds > timeout_s:
            there = "; ".join(f"{node.hostname} {node.ip} with {node.gpus:g} GPUs" for node in nodes) or "none"
            raise ClusterError(
                f"the Ray cluster at {address} is not complete after {timeout_s:g} s: {state} (nodes there: {there}) "
                "-- look at the logs of the nodes that are missing"
            )
        if state != last:
            say(f"{state} at {address} ({seconds:.0f} s)")
            last = state
        time.sleep(POLL_S)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return True
    except OSError:
        return False


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    if len(arguments) == 1:
        ask_nodes(arguments[0])
        return
    if len(arguments) != 4:
        sys.exit(__doc__)
    address, nodes, gpus, seconds = arguments
    # Where what listens is not Ray, the question itself may not come back.
    signal.alarm(int(float(seconds)) + 60)
    start = time.monotonic()
    try:
        ready = wait_until_ready(
            address, int(nodes), float(gpus), float(seconds), lambda words: print(f"[wait] {words}", flush=True)
        )
    except ClusterError as error:
        sys.exit(f"[wait] {error}")
    finally:
        signal.alarm(0)
    total = sum(node.gpus for node in ready)
    print(f"[wait] {len(ready)} nodes and {total:g} GPUs at {address} after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
