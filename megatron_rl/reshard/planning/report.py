"""The output of `megatron-rl plan`: bytes, seconds and memory of a weight sync, as tables or one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.reshard.planning.cost import SyncCost, sync_cost
from megatron_rl.reshard.planning.request import ITEM_SIZES, SyncRequest

GB = 1e9
_UNITS = (("GB", GB), ("MB", 1e6), ("kB", 1e3))
_SHOWN_SLOTS = 64
_NOTHING_SAVED = 0.995


@dataclass(frozen=True)
class Spread:
    """Mean, maximum and total of one quantity over ranks, in bytes."""

    mean: float
    max: float
    total: float


def spread(values: Iterable[float]) -> Spread:
    """Mean, maximum and total; zeros if there are no values."""
    listed = list(values)
    return Spread(sum(listed) / len(listed), max(listed), sum(listed)) if listed else Spread(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Report:
    """Everything that the command prints.

    bytes: quantity -> spread in bytes; `sent` is over all ranks, the others over engine ranks. links: link -> bytes of
    the busiest rank. seconds: step -> expected seconds. memory: phase -> what is stored -> bytes on the fullest GPU.
    """

    request: SyncRequest
    cost: SyncCost
    bytes: dict[str, Spread]
    links: Mapping[str, int]
    seconds: dict[str, float]
    memory: dict[str, dict[str, float]]

    @property
    def unit(self) -> tuple[str, float]:
        """Name and bytes of the unit for this model's size: GB, MB or kB."""
        size = self.cost.loads.total * ITEM_SIZES[self.request.dtype]
        return next((unit for unit in _UNITS if size >= unit[1] / 10), _UNITS[-1])

    @property
    def ratio(self) -> float:
        """Bytes received over the minimum."""
        least = self.bytes["minimum"].total
        return self.bytes["moved"].total / least if least else 1.0

    @property
    def saves_nothing(self) -> bool:
        """Every engine rank must receive as much as in a full gather."""
        return self.bytes["minimum"].total >= _NOTHING_SAVED * self.bytes["full_gather"].total

    @property
    def moves_nothing(self) -> bool:
        """Each engine rank finds all it needs in its own trainer shard."""
        return self.bytes["moved"].total == 0


def make_report(request: SyncRequest) -> Report:
    """Estimate the sync that the request describes. Raises ReshardError if it cannot be planned."""
    cost = sync_cost(
        request.table, request.trainers, tp=request.tp, ep=request.ep, replicas=request.replicas,
        colocated=request.colocated, gpus_per_node=request.gpus_per_node, ascending=request.ascending,
    )  # fmt: skip
    loads, item = cost.loads, ITEM_SIZES[request.dtype]
    engines = cost.engine.ranks
    full = {rank: loads.total - loads.held[rank] for rank in engines}
    sizes = {
        "needed": spread(loads.needed[rank] * item for rank in engines),
        "local": spread(loads.local[rank] * item for rank in engines),
        "moved": spread(loads.moved[rank] * item for rank in engines),
        "minimum": spread(loads.minimum[rank] * item for rank in engines),
        "full_gather": spread(full[rank] * item for rank in engines),
        "sent": spread(loads.sent[rank] * item for rank in loads.ranks),
    }
    links = {
        "sent in node": max(loads.sent[rank] - loads.far_sent[rank] for rank in loads.ranks) * item,
        "received in node": max(loads.moved[rank] - loads.far_moved[rank] for rank in loads.ranks) * item,
        "sent between nodes": max(loads.far_sent.values()) * item,
        "received between nodes": max(loads.far_moved.values()) * item,
    }
    return Report(request, cost, sizes, links, _seconds(request, cost, full), _memory(request, cost))


def _seconds(request: SyncRequest, cost: SyncCost, full: Mapping[int, int]) -> dict[str, float]:
    """Expected seconds of the busiest rank: what it sends or receives (the larger), within its node and then between
    nodes; and its local copies, one read and one write at memory bandwidth.
    """
    loads, machine, item = cost.loads, request.machine, ITEM_SIZES[request.dtype]
    near, far, memory = (speed * GB for speed in (machine.nvlink_gb_s, machine.network_gb_s, machine.memory_gb_s))

    def transfer(total: Mapping[int, int], crossing: Mapping[int, int], rank: int) -> float:
        return item * ((total[rank] - crossing[rank]) / near + crossing[rank] / far)

    links = max(
        max(transfer(loads.sent, loads.far_sent, rank), transfer(loads.moved, loads.far_moved, rank))
        for rank in loads.ranks
    )
    nodes = loads.placement.nodes
    gather = max(
        item
        * ((cost.node_held[nodes[rank]] - loads.held[rank]) / near + (loads.total - cost.node_held[nodes[rank]]) / far)
        for rank in full
    )
    return {"links": links, "local copies": 2 * item * max(loads.local.values()) / memory, "full gather": gather}


def _memory(request: SyncRequest, cost: SyncCost) -> dict[str, dict[str, float]]:
    """Bytes of the fullest GPU by phase, nothing offloaded or shared. Gradients are float32; the optimizer state is 12
    bytes a parameter, sharded over all trainer ranks. With LoRA both are those of the adapters, which are counted as if
    spread evenly over the ranks of one copy.
    """
    loads, item, world = cost.loads, ITEM_SIZES[request.dtype], request.trainers.topology.world
    held, needed = max(loads.held.values()), max(loads.needed.values())
    overlap = min((loads.local[rank] for rank in cost.engine.ranks), default=0) * item
    trainer, engine = float(held * item), float(needed * item)
    share = 1.0 if request.trained is None else request.trained / loads.total
    optimizer = 12.0 * loads.total * share / world
    staging = 2 * request.machine.bucket_mib * 2**20 if any(loads.moved.values()) else 0.0
    update = {"trainer weights": trainer, "gradients": 4.0 * held * share, "optimizer": optimizer}
    if not request.colocated:
        return {
            "trainer, update": update,
            "trainer, publish": {**update, "staging": staging},
            "engine, generate": {"engine weights": engine},
            "engine, publish": {"engine weights": engine, "staging": staging},
        }
    both = {"trainer weights": trainer, "engine weights": engine}
    return {
        "generate": both,
        "update": {**both, "gradients": update["gradients"], "optimizer": optimizer},
        "publish": {**both, "staging": staging},
        "shared instead of copied, at most": {"saved": overlap},
    }


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object: sizes in bytes, times in seconds."""
    request, cost = report.request, report.cost
    loads, item = cost.loads, ITEM_SIZES[request.dtype]
    engines = set(cost.engine.ranks)
    return {
        "ok": True,
        "model": request.model,
        "parameters": loads.total,
        "train": dict(request.axes),
        "rollout": {"tp": request.tp, "ep": request.ep, "dp": request.replicas},
        "gpus": request.world,
        "gpus_per_node": request.gpus_per_node,
        "placement": "colocated" if request.colocated else "disaggregated",
        "dtype": request.dtype,
        "bytes": {name: asdict(one) for name, one in report.bytes.items()},
        "ratio_moved_to_minimum": report.ratio,
        "nothing_can_be_saved": report.saves_nothing,
        "busiest_link": report.links,
        "natural_order_moved": None if cost.natural_moved is None else cost.natural_moved * item,
        "moves": cost.num_moves,
        "waves": cost.num_waves,
        "bundles": cost.num_bundles,
        "seconds": report.seconds,
        "memory": report.memory,
        "machine": asdict(request.machine),
        "order": list(cost.engine.ranks),
        "ranks": [
            {
                "rank": rank,
                "node": loads.placement.nodes[rank],
                "local": loads.local[rank] * item,
                "moved": loads.moved[rank] * item,
                "sent": loads.sent[rank] * item,
                "minimum": loads.minimum[rank] * item,
                "full_gather": (loads.total - loads.held[rank]) * item if rank in engines else 0,
                "needed": loads.needed[rank] * item,
                "held": loads.held[rank] * item,
            }
            for rank in loads.ranks
        ],
    }


def as_text(report: Report) -> str:
    """The report as tables."""
    request, cost = report.request, report.cost
    unit, scale = report.unit
    whole = cost.loads.total * ITEM_SIZES[request.dtype] / scale
    hidden = () if any(request.table.num_experts(layers[0]) for layers in request.table.variants()) else ("ep", "etp")
    axes = " ".join(f"{name} {size}" for name, size in request.axes.items() if name not in hidden)
    engine = f"{request.replicas} engines of tp {request.tp}" + (f", ep {request.ep}" if request.ep > 1 else "")
    place = "on the same GPUs" if request.colocated else "on other GPUs"
    lines = [
        f"{request.model}: {cost.loads.total:,} parameters, {whole:.1f} {unit} in {request.dtype}",
        f"train {axes}; {engine} {place}; {request.world} GPUs, {request.gpus_per_node} per node",
        "",
        f"bytes of one weight sync, {unit}",
        *_bytes_table(report),
        "",
        f"moved / minimum: {report.ratio:.2f} (proved: each engine byte is written exactly once)",
        *_verdict(report),
        "",
        "rank order",
        *_order_lines(report),
        "",
        f"busiest link of one GPU, {unit}",
        *_columns([(name, f"{size / scale:.2f}") for name, size in report.links.items()]),
        "",
        "expected seconds",
        *_seconds_lines(report),
        "",
        f"memory of the fullest GPU, {unit} (without KV cache and activations, nothing offloaded)",
    ]
    for phase, parts in report.memory.items():
        total = f"{sum(parts.values()) / scale:8.2f}"
        lines.append(
            f"  {phase:<34}{total}  " + " + ".join(f"{name} {size / scale:.2f}" for name, size in parts.items())
        )
    return "\n".join(lines)


_NAMES = {
    "needed": "engine parameters",
    "local": "local copies",
    "moved": "received",
    "minimum": "minimum to receive",
    "full_gather": "full gather receives",
    "sent": "sent",
}


def _bytes_table(report: Report) -> list[str]:
    rows = [f"  {'':<22}{'mean':>10}{'max':>10}{'total':>12}"]
    _, scale = report.unit
    for name, title in _NAMES.items():
        one = report.bytes[name]
        rows.append(f"  {title:<22}{one.mean / scale:>10.2f}{one.max / scale:>10.2f}{one.total / scale:>12.1f}")
    return rows


def _verdict(report: Report) -> list[str]:
    moved, full = report.bytes["moved"].total, report.bytes["full_gather"].total
    if report.moves_nothing:
        return ["nothing to send: each engine rank finds all it needs in the trainer shard on its GPU"]
    if report.saves_nothing:
        return [
            "nothing can be saved: each engine rank needs the whole model, so the minimum equals a full gather; "
            "a larger rollout.tp would need less"
        ]
    return [f"a full gather receives {full / moved:.1f} times as much"]


def _order_lines(report: Report) -> list[str]:
    cost, item = report.cost, ITEM_SIZES[report.request.dtype]
    ranks, tp = cost.engine.ranks, report.request.tp
    if cost.natural_moved is None:
        return [f"  engines are on ranks {ranks[0]} to {ranks[-1]}, in order"]
    if ranks == tuple(range(len(ranks))):
        return ["  natural: engine slot s is on rank s; no other order receives less"]
    shown = [str(ranks[at : at + tp]) for at in range(0, min(len(ranks), _SHOWN_SLOTS), tp)]
    more = "" if len(ranks) <= _SHOWN_SLOTS else f" ... ({len(ranks) // tp} engines; --json lists all)"
    moved, natural = sum(cost.loads.moved.values()) * item, cost.natural_moved * item
    extra = f"{100 * (natural / moved - 1):.1f} % more" if moved else "more"
    unit, scale = report.unit
    return [
        f"  engines: {' '.join(shown)}{more}",
        f"  the natural order would receive {natural / scale:.1f} {unit} in total, {extra}",
    ]


def _seconds_lines(report: Report) -> list[str]:
    seconds, machine = report.seconds, report.request.machine
    sync = seconds["links"] + seconds["local copies"]
    speeds = f"{machine.nvlink_gb_s:g} GB/s within a node, {machine.network_gb_s:g} between nodes"
    gain = f", {seconds['full gather'] / sync:.1f} times as long" if sync else ""
    return [
        f"  this plan    {sync:8.4f}  links {seconds['links']:.4f} + local copies {seconds['local copies']:.4f}; "
        f"{report.cost.num_waves} " + ("wave" if report.cost.num_waves == 1 else "waves"),
        f"  full gather  {seconds['full gather']:8.4f}  receiving only{gain}",
        f"  at {speeds}, memory {machine.memory_gb_s:g}; a lower bound from bandwidth, without latency and packing",
    ]


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name:<24}{value:>10}" for name, value in rows]
