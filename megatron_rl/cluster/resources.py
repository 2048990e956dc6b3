"""From the config to what is asked of Ray: device, bundles, and which bundle holds which rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError

Device = Literal["cpu", "cuda"]


def resolve_device(device: str) -> Device:
    """cpu or cuda; auto is cuda where torch sees a GPU. ClusterError for cuda without one."""
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise ClusterError(
            "cluster.device: 'cuda' -- torch sees no GPU here -- use a GPU machine with a CUDA build of "
            "torch, or cluster.device=cpu"
        )
    return "cpu"


def device_of_nodes(cluster: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> Device:
    """cpu or cuda for the ranks of a Ray cluster that is joined, whatever the controller's own machine has.

    nodes: see require_room. auto is cuda if the cluster has any GPU. ClusterError where there are GPUs, or cuda is
    asked for, and cluster.nnodes nodes with cluster.n_gpus_per_node GPUs are not there.
    """
    if cluster.device == "cpu":
        return "cpu"
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    if sum(count >= cluster.n_gpus_per_node for count in gpus) >= cluster.nnodes:
        return "cuda"
    if cluster.device == "auto" and not any(gpus):
        return "cpu"
    there = ", ".join(map(str, gpus)) or "none"
    raise ClusterError(
        f"cluster.device: {cluster.device!r} -- {cluster.nnodes} node(s) with {cluster.n_gpus_per_node} GPUs each are "
        f"asked for, and the nodes of the Ray cluster have these numbers of GPUs: {there} -- ask for what is there "
        "(cluster.nnodes, cluster.n_gpus_per_node), add nodes, or set cluster.device=cpu"
    )


@dataclass(frozen=True)
class RankPlacement:
    """A placement group and the ranks in it.

    Example, 2 nodes of 2 GPUs: strategy="STRICT_SPREAD", bundles=({"CPU": 2.0, "GPU": 2.0},) * 2, bundle_of_rank=(0,
    0, 1, 1)
    """

    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]
    bundles: tuple[dict[str, float], ...]
    bundle_of_rank: tuple[int, ...]
    per_rank: dict[str, float]
    """Resources of one rank: CPU, and GPU on cuda."""

    @property
    def world(self) -> int:
        return len(self.bundle_of_rank)


NO_CPUS = {"memory": 1.0}
"""What a rank that takes no CPUs asks for: a bundle must ask for something, and every node has bytes of memory."""


def plan_placement(cluster: ClusterConfig, device: Device, takes_cpus: bool = True) -> RankPlacement:
    """One node: a bundle for each rank, all on one machine. More: a bundle for each node, holding all its ranks, and no
    two on one machine.
    """
    per_rank = {"CPU": cluster.num_cpus_per_rank} if takes_cpus else dict(NO_CPUS)
    if device == "cuda":
        per_rank["GPU"] = 1.0
    ranks = cluster.n_gpus_per_node
    if cluster.nnodes == 1:
        return RankPlacement("STRICT_PACK", tuple(dict(per_rank) for _ in range(ranks)), tuple(range(ranks)), per_rank)
    node = {name: amount * ranks for name, amount in per_rank.items()}
    bundle_of_rank = tuple(rank // ranks for rank in range(cluster.nnodes * ranks))
    return RankPlacement("STRICT_SPREAD", tuple(dict(node) for _ in range(cluster.nnodes)), bundle_of_rank, per_rank)


def require_room(placement: RankPlacement, cluster: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse a placement that no machine can ever hold: waiting for it would never end.

    nodes: total resources of each machine of the Ray cluster, such as {"CPU": 8.0, "GPU": 2.0}.
    ClusterError naming what is asked and what is there.
    """
    ranks = cluster.n_gpus_per_node
    per_node = {name: amount * ranks for name, amount in placement.per_rank.items()}
    room = sum(all(node.get(name, 0.0) >= amount for name, amount in per_node.items()) for node in nodes)
    if room >= cluster.nnodes:
        return
    asked = " and ".join(f"{amount:g} {name}" for name, amount in per_node.items())
    there = "; ".join(" and ".join(f"{node.get(name, 0):g} {name}" for name in per_node) for node in nodes)
    where = "one node" if cluster.nnodes == 1 else f"each of {cluster.nnodes} nodes"
    raise ClusterError(
        f"cluster.n_gpus_per_node: {ranks} -- {ranks} ranks of {placement.per_rank.get('CPU', 0.0):g} CPU each ask "
        f"for {asked} on {where}, but Ray has {there or 'no node'} -- lower cluster.num_cpus_per_rank "
        "(0.5 lets two ranks share a core) or cluster.n_gpus_per_node, or add machines"
    )


def in_order(placement: RankPlacement, hints: Sequence[str], ips: Sequence[str]) -> RankPlacement:
    """Several nodes: the ranks numbered by where their node is, so that neighbours in rank are near each other.

    hints, ips: of the node of each bundle. A hint such as "spine1.leaf3.node17" (Slurm's SLURM_TOPOLOGY_ADDR) comes
    first, then the address; numbers in both are compared as numbers.
    """
    if placement.strategy == "STRICT_PACK":
        return placement
    order = sorted(range(len(hints)), key=lambda bundle: (_natural(hints[bundle]), _natural(ips[bundle])))
    return replace(placement, bundle_of_rank=tuple(order[bundle] for bundle in placement.bundle_of_rank))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts the numbers in a text as numbers: "node9" before "node10"."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", text) if word]


def placement_table(rows: Sequence[tuple[str, ...]]) -> str:
    """The table of ranks, one line each. rows: (host, address, GPU, coordinates) by rank."""
    table = [("rank", "node", "address", "gpu", "place"), *((str(rank), *row) for rank, row in enumerate(rows))]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "\n".join(lines)
