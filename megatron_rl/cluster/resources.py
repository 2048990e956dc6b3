"""From the config to what is asked of Ray: device, bundles, and which bundle holds which rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class RankPlacement:
    """A placement group and the ranks in it.

    Example, 2 nodes of 2 GPUs: strategy="PACK", bundles=({"CPU": 2.0, "GPU": 2.0},) * 2, bundle_of_rank=(0,
    0, 1, 1)
    """

    strategy: Literal["STRICT_PACK", "PACK"]
    bundles: tuple[dict[str, float], ...]
    bundle_of_rank: tuple[int, ...]
    per_rank: dict[str, float]
    """Resources of one rank: CPU, and GPU on cuda."""

    @property
    def world(self) -> int:
        return len(self.bundle_of_rank)


def plan_placement(cluster: ClusterConfig, device: Device) -> RankPlacement:
    """One node: a bundle for each rank, all on one machine. More: a bundle for each node, holding all its ranks."""
    per_rank = {"CPU": cluster.num_cpus_per_rank}
    if device == "cuda":
        per_rank["GPU"] = 1.0
    ranks = cluster.n_gpus_per_node
    if cluster.nnodes == 1:
        return RankPlacement("STRICT_PACK", tuple(dict(per_rank) for _ in range(ranks)), tuple(range(ranks)), per_rank)
    node = {name: amount * ranks for name, amount in per_rank.items()}
    bundle_of_rank = tuple(rank // ranks for rank in range(cluster.nnodes * ranks))
    return RankPlacement("PACK", tuple(dict(node) for _ in range(cluster.nnodes)), bundle_of_rank, per_rank)


def require_room(placement: RankPlacement, cluster: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse a placement that no machine can ever hold: waiting for it would never end.

    nodes: total resources of each machine of the Ray cluster, such as {"CPU": 8.0, "GPU": 2.0}.
    ClusterError naming what is asked and what is there.
    """
    ranks = cluster.n_gpus_per_node
    per_node = {name: amount * ranks for name, amount in placement.per_rank.items()}
    room = sum(int(_slots(node, per_node)) for node in nodes)
    if room >= cluster.nnodes:
        return
    asked = " and ".join(f"{amount:g} {name}" for name, amount in per_node.items())
    there = "; ".join(" and ".join(f"{node.get(name, 0):g} {name}" for name in per_node) for node in nodes)
    where = "one node" if cluster.nnodes == 1 else f"each of {cluster.nnodes} nodes"
    raise ClusterError(
        f"cluster.n_gpus_per_node: {ranks} -- {ranks} ranks of {placement.per_rank['CPU']:g} CPU each ask "
        f"for {asked} on {where}, but Ray has {there or 'no node'} -- lower cluster.num_cpus_per_rank "
        "(0.5 lets two ranks share a core) or cluster.n_gpus_per_node, or add machines"
    )


def _slots(node: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """How many times what is wanted fits into a machine."""
    return min(node.get(name, 0.0) / amount for name, amount in wanted.items())
