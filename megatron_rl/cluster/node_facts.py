"""What each node of a joined Ray cluster says of itself, before any rank starts there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.addresses import NodeAddress, choose_address, own_interfaces
from megatron_rl.cluster.environment import passed
from megatron_rl.errors import ClusterError


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    host: str
    address: NodeAddress
    """Where the ranks of other nodes reach it."""
    environment: dict[str, str]
    """The variables of its own that its ranks keep: those that its Ray was started with."""
    topology: str
    """Where it is in the network: RL_TOPOLOGY or Slurm's SLURM_TOPOLOGY_ADDR; empty if neither is set."""


def ask_nodes_of_themselves(
    node_ids: Sequence[str], controller: Mapping[str, str], interface: str | None, timeout_s: float
) -> dict[str, NodeFacts]:
    """Node id -> its facts. controller: the controller's environment. interface: cluster.network_interface.

    ClusterError of the first node whose interfaces do not fit, or that does not answer within timeout_s seconds.
    """
    task, values = ray.remote(_facts), passed(controller)
    asked: dict[str, ray.ObjectRef] = {}
    for node in dict.fromkeys(node_ids):
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(values, interface)
    done, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    if late:
        silent = sorted(node for node, ref in asked.items() if ref in late)
        raise ClusterError(
            f"node(s) {', '.join(silent)} of the Ray cluster did not answer within {timeout_s:g} s "
            "-- look at the raylet's log there, or raise cluster.start_timeout_s"
        )
    answers: list[NodeFacts | ClusterError] = ray.get(done)
    for answer in answers:
        if isinstance(answer, ClusterError):
            raise answer
    by_ref = dict(zip(done, answers, strict=True))
    return {node: fact for node, ref in asked.items() if not isinstance(fact := by_ref[ref], ClusterError)}


def _facts(controller: Mapping[str, str], interface: str | None) -> NodeFacts | ClusterError:
    """Of the node it runs on. Ray adds variables to those of its processes; the raylet has the node's own."""
    raylet = psutil.Process().parent()
    environ = dict(os.environ) if raylet is None else raylet.environ()
    own = passed(environ)
    try:
        address = choose_address(own_interfaces(), ray.util.get_node_ip_address(), {**controller, **own}, interface)
    except ClusterError as error:
        return error
    topology = environ.get("RL_TOPOLOGY") or environ.get("SLURM_TOPOLOGY_ADDR") or ""
    return NodeFacts(os.uname().nodename, address, own, topology)
