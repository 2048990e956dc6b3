"""The bytes of a sync of a model of any size, without a plan of every tensor: 671 B numbers on 1,024 processes. Pure.

Tensors that lie the same way on the same processes of both sides are one bundle with a count; solve.py chooses and
proves the moves of a bundle, as it does for the exact plan. Here the bundles are made straight from the axes: one
layer stands for all like it in a pipeline stage, one expert for all that share trainer and engine ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.models.engine import experts_of
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.planning.tables import Held, ModelTable
from megatron_rl.reshard.rank_order import best_order, overlaps_of
from megatron_rl.reshard.shards import EngineLayout
from megatron_rl.reshard.solve import Bundle, Loads, Placement, Rect, area, merge_rects, solve

HolderTable = dict[tuple[Rect, ...], tuple[int, ...]]
"""rectangles of one tensor -> who has exactly these"""


@dataclass(frozen=True)
class Trainers:
    """The training side: its axes, and the [pp][vpp] layers of its stages."""

    topology: Topology
    stages: Sequence[Sequence[range]]

    @cached_property
    def dense_ranks(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(stage, tp rank) -> the ranks there."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.topology.world):
            at = self.topology.coords(rank)
            found.setdefault((at.pp, at.tp), []).append(rank)
        return {key: tuple(ranks) for key, ranks in found.items()}

    @cached_property
    def expert_ranks(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """(stage, ep rank, etp rank) -> the ranks there."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.topology.world):
            at = self.topology.expert_coords(rank)
            found.setdefault((at.pp, at.ep, at.etp), []).append(rank)
        return {key: tuple(ranks) for key, ranks in found.items()}


@dataclass(frozen=True)
class Account:
    """What a sync costs. engine: its layout with the chosen order of processes.

    natural_moved: elements that all processes would receive if engine slot s were process s; None when not colocated.
    node_held: node -> elements of the model that its trainers hold together.
    """

    loads: Loads
    engine: EngineLayout
    natural_moved: int | None
    node_held: Mapping[int, int]
    num_moves: int
    num_waves: int
    num_bundles: int


def account(
    table: ModelTable,
    trainers: Trainers,
    *,
    tp: int,
    ep: int,
    replicas: int,
    colocated: bool,
    gpus_per_node: int,
    ascending: bool = False,
) -> Account:
    """Choose the rank order and every move, prove them, and add up. Raises ReshardError as make_plan does.

    tp, ep, replicas: of the engines (shards.EngineLayout). Colocated, they take the trainer's processes; else processes
    numbered after these. gpus_per_node: processes of a node, one a GPU. ascending: see search.best_order.
    """
    world, count = trainers.topology.world, replicas * tp
    ranks = tuple(range(count)) if colocated else tuple(range(world, world + count))
    bundles = kind_bundles(table, trainers, tp=tp, ep=ep)
    engine = EngineLayout(tp, ep, ranks)
    covered = None
    if colocated:
        engine, covered = _searched(bundles, engine, gpus_per_node, ascending)
    everyone = tuple(sorted({*range(world), *ranks}))
    nodes = {rank: rank // gpus_per_node for rank in everyone}
    loads = Loads(Placement(everyone, nodes, {rank: rank for rank in everyone}, colocated))
    moves = waves = 0
    for solved in solve(placed(bundles, engine), loads):
        moves += len(solved.moves) * solved.count
        waves = max(waves, *(step[3] + 1 for step in solved.moves))
    natural = None if covered is None else sum(loads.needed.values()) - covered
    return Account(loads, engine, natural, _node_held(bundles, nodes), moves, waves, len(bundles))


def colocated_layout(
    table: ModelTable, trainers: Trainers, *, tp: int, ep: int = 1, gpus_per_node: int, ascending: bool = False
) -> EngineLayout:
    """Engines on all of the trainer's processes, in the order that lets each keep most of what it has.

    Raises ReshardError where the processes do not divide into engines. The same on every process: it is computed from
    the axes alone. ascending: see search.best_order.
    """
    engine = EngineLayout(tp, ep, tuple(range(trainers.topology.world)))
    return _searched(kind_bundles(table, trainers, tp=tp, ep=ep), engine, gpus_per_node, ascending)[0]


def _searched(
    bundles: Sequence[Bundle], engine: EngineLayout, gpus_per_node: int, ascending: bool
) -> tuple[EngineLayout, int]:
    """The engines in the best order; and the elements that the natural order would cover."""
    ranks, kinds = engine.ranks, engine.num_kinds
    overlaps = overlaps_of(bundles, ranks, kinds)
    per_node = min(gpus_per_node, len(ranks))
    order = best_order(overlaps, ranks, num_kinds=kinds, gpus_per_node=per_node, ascending=ascending)
    return replace(engine, ranks=order), sum(overlaps[rank][slot % kinds] for slot, rank in enumerate(ranks))


def _node_held(bundles: Iterable[Bundle], nodes: Mapping[int, int]) -> dict[int, int]:
    found = dict.fromkeys(nodes.values(), 0)
    for bundle in bundles:
        by_node: dict[int, set[Rect]] = {}
        for rects, ranks in bundle.held.items():
            for node in {nodes[rank] for rank in ranks}:
                by_node.setdefault(node, set()).update(rects)
        known: dict[frozenset[Rect], int] = {}
        for node, rects in by_node.items():
            key = frozenset(rects)
            if key not in known:
                known[key] = sum(map(area, merge_rects(key)))
            found[node] += known[key] * bundle.count
    return found


def placed(bundles: Iterable[Bundle], engine: EngineLayout) -> Iterator[Bundle]:
    """Bundles by kind of slot as bundles by process."""
    of_kind: list[list[int]] = [[] for _ in range(engine.num_kinds)]
    for slot, rank in enumerate(engine.ranks):
        of_kind[slot % engine.num_kinds].append(rank)
    for bundle in bundles:
        needed = {
            rects: tuple(sorted(rank for kind in kinds for rank in of_kind[kind]))
            for rects, kinds in bundle.needed.items()
        }
        yield replace(bundle, needed=needed)


def kind_bundles(table: ModelTable, trainers: Trainers, *, tp: int, ep: int) -> list[Bundle]:
    """Bundles of the whole model whose `needed` is by kind of engine slot (EngineLayout.num_kinds)."""
    found: dict[object, Bundle] = {}
    for bundle in (*_ends(table, trainers, tp, ep), *_layers(table, trainers, tp, ep)):
        key = bundle.key
        known = found.get(key)
        found[key] = bundle if known is None else replace(known, count=known.count + bundle.count)
    return list(found.values())


def _ends(table: ModelTable, trainers: Trainers, tp: int, ep: int) -> Iterator[Bundle]:
    size, last = trainers.topology.tp, len(trainers.stages) - 1
    parts = [
        (table.trainer_ends(size, rank, first=stage == 0, last=stage == last), trainers.dense_ranks[stage, rank])
        for stage in sorted({0, last})
        for rank in range(size)
    ]
    needed = _owners((table.engine_ends(tp, kind % tp), (kind,)) for kind in range(max(tp, ep)))
    for name, owners in _owners(parts).items():
        yield Bundle((name,), 1, owners, needed[name], flat=name.endswith("norm.weight"))


def _layers(table: ModelTable, trainers: Trainers, tp: int, ep: int) -> Iterator[Bundle]:
    topology = trainers.topology
    stage_of = {layer: stage for stage, chunks in enumerate(trainers.stages) for chunk in chunks for layer in chunk}
    for variant in table.variants():
        shown = variant[0]
        needed = _owners((table.engine(shown, tp, kind % tp, ep, kind % ep), (kind,)) for kind in range(max(tp, ep)))
        dense = [table.trainer(shown, topology.tp, rank) for rank in range(topology.tp)]
        groups = [
            (ep_rank, count, [table.trainer_expert(shown, expert, topology.expert_tp, part) for part in parts])
            for ep_rank, expert, count in _expert_groups(table.num_experts(shown), topology.ep, ep)
            for parts in [range(topology.expert_tp)]
        ]
        for stage in range(len(trainers.stages)):
            layers = [layer for layer in variant if stage_of[layer] == stage]
            if not layers:
                continue
            parts = [(held, trainers.dense_ranks[stage, rank]) for rank, held in enumerate(dense)]
            found = [(name, owners, 1) for name, owners in _owners(parts).items()]
            for ep_rank, count, experts in groups:
                parts = [(held, trainers.expert_ranks[stage, ep_rank, part]) for part, held in enumerate(experts)]
                found += [(name, owners, count) for name, owners in _owners(parts).items()]
            for name, owners, count in found:
                flat = name.endswith(("norm.weight", ".bias", "_bias"))
                title = name.replace(f"layers.{shown}.", f"layers.{layers[0]}.", 1)
                yield Bundle((title,), count * len(layers), owners, needed[name], flat)


def _expert_groups(num_experts: int, trainer_ep: int, engine_ep: int) -> Iterator[tuple[int, int, int]]:
    """(trainer ep rank, first expert, number of experts) of each set that shares the ep ranks of both sides."""
    if not num_experts:
        return
    share = num_experts // trainer_ep
    for ep_rank in range(trainer_ep):
        for engine_rank in range(engine_ep):
            others = experts_of(num_experts, engine_ep, engine_rank)
            first, last = max(ep_rank * share, others.start), min((ep_rank + 1) * share, others.stop)
            if first < last:
                yield ep_rank, first, last - first


def _owners(parts: Iterable[tuple[Held, Sequence[int]]]) -> dict[str, HolderTable]:
    """By HF name: who has which rectangles."""
    found: dict[str, dict[tuple[Rect, ...], list[int]]] = {}
    for held, owners in parts:
        for name, rects in held.items():
            found.setdefault(name, {}).setdefault(rects, []).extend(owners)
    return {
        name: {rects: tuple(sorted(owners)) for rects, owners in by_rects.items()} for name, by_rects in found.items()
    }
