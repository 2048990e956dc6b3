"""Random layouts of both sides, and a numpy simulation of a plan: helpers of the reshard tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import LocalParam, constants, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.stages import stage_layers
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.plan import BlockIndex, Plan, Shard, bundles_of
from megatron_rl.reshard.rank_order import best_order, overlaps_of
from megatron_rl.reshard.shards import EngineLayout, engine_shards, kind_shards, trainer_shards, whole_shards
from tests.helpers.oddities import oddities

# The same cases in each run; no time limit, which a busy machine would break.
QUIET = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
Arrays = dict[str, np.ndarray]


def shape_of(
    architecture: str = "LlamaForCausalLM", *, layers: int = 2, heads: int = 4, kv: int = 2, head_dim: int = 2,
    hidden: int = 4, ffn: int = 8, vocab: int = 70, tied: bool = False, experts: int = 4,
) -> ModelShape:  # fmt: skip
    has_experts = FAMILIES[architecture].fields.experts
    return ModelShape(
        architecture=architecture, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv,
        head_dim=head_dim, ffn_size=ffn, vocab_size=vocab, tie_word_embeddings=tied,
        rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, initializer_range=0.02,
        num_experts=experts if has_experts else 0, num_experts_per_tok=2 if has_experts else 0,
        **oddities(architecture, layers, ffn),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One pair of layouts. whole: engines hold HF tensors. gpus_per_node: processes of a node."""

    shape: ModelShape
    topology: Topology
    stages: tuple[tuple[range, ...], ...]
    engine: EngineLayout
    whole: bool
    gpus_per_node: int

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def trainers(self) -> list[Shard]:
        return trainer_shards(self.shape, FAMILIES[self.shape.architecture], self.topology, self.stages)

    def engines(self) -> list[Shard]:
        family = FAMILIES[self.shape.architecture]
        if self.whole:
            return whole_shards(self.shape, family, self.engine.ranks)
        return engine_shards(self.shape, family, self.engine)


@st.composite
def cases(draw: st.DrawFn, whole: bool = True) -> Case:
    """Both sides at random: family, sizes, TP x PP x VPP x uneven x EP x ETP x DP against TP x EP x DP, placement.

    whole: some engines hold HF tensors as they are.
    """
    architecture = draw(st.sampled_from(sorted(FAMILIES)))
    engine_tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv = draw(st.sampled_from([1, 2, 4]))
    per_group = 8 // kv if engine_tp == 8 else max(engine_tp // kv, draw(st.integers(1, 2)))
    tp = draw(st.sampled_from([size for size in (1, 2, 4) if kv % size == 0]))
    spread = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1)]
    pp, dp = draw(st.sampled_from([one for one in spread if one[0] * one[1] * tp <= 8]))
    vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    first = draw(st.sampled_from([None, vpp])) if pp > 1 else None
    layers = pp * vpp if first is None else vpp + (pp - 1) * vpp * draw(st.integers(1, 2))
    world = tp * pp * dp
    experts, ep, etp = FAMILIES[architecture].fields.experts, 1, 1
    if experts:
        splits = [(a, b) for a in (1, 2, 4) for b in (1, 2) if world // pp % (a * b) == 0]
        ep, etp = draw(st.sampled_from(splits))
    shape = shape_of(
        architecture, layers=layers, heads=kv * per_group, kv=kv, hidden=2, ffn=8, experts=4,
        vocab=draw(st.integers(60, 70)), tied=draw(st.booleans()),
    )  # fmt: skip
    topology = Topology(world, tp=tp, pp=pp, ep=ep, etp=etp if experts else None)
    stages = tuple(tuple(stage) for stage in stage_layers(layers, pp, vpp, first))
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    if whole and draw(st.integers(0, 15)) == 0:
        return Case(shape, topology, stages, EngineLayout(1, 1, tuple(range(world))), True, per_node)
    engine = _engine(draw, shape, topology, stages, engine_tp, per_node)
    return Case(shape, topology, stages, engine, False, per_node)


def _engine(
    draw: st.DrawFn, shape: ModelShape, topology: Topology, stages: Sequence[Sequence[range]], tp: int, per_node: int
) -> EngineLayout:
    world = topology.world
    colocated = draw(st.booleans()) and world % tp == 0
    eps = [1, tp] if shape.num_experts and tp <= 4 else [1]
    if tp <= 2 and shape.num_experts and (not colocated or world % (2 * tp) == 0):
        eps.append(2 * tp)
    ep = draw(st.sampled_from(eps))
    if not colocated:
        count = max(tp, ep) * (draw(st.integers(1, 3)) if tp < 8 else 1)
        return EngineLayout(tp, ep, tuple(range(world, world + count)))
    order = tuple(range(world))
    if draw(st.booleans()):
        order = searched(shape, topology, stages, tp, ep, per_node)
    return EngineLayout(tp, ep, order)


def overlaps(
    shape: ModelShape, topology: Topology, stages: Sequence[Sequence[range]], tp: int, ep: int = 1
) -> dict[int, tuple[int, ...]]:
    """What each trainer process covers of each kind of engine slot."""
    family = FAMILIES[shape.architecture]
    bundles, _ = bundles_of(trainer_shards(shape, family, topology, stages), kind_shards(shape, family, tp=tp, ep=ep))
    return overlaps_of(bundles, range(topology.world), max(tp, ep))


def searched(
    shape: ModelShape, topology: Topology, stages: Sequence[Sequence[range]], tp: int, ep: int, per_node: int
) -> tuple[int, ...]:
    """The rank order that the search finds."""
    rows = overlaps(shape, topology, stages, tp, ep)
    per_node = min(per_node, topology.world)
    return best_order(rows, range(topology.world), num_kinds=max(tp, ep), gpus_per_node=per_node)


def hf_arrays(shape: ModelShape) -> Arrays:
    """Every HF tensor that updates change, with numbers that occur once in the model: int32."""
    arrays: Arrays = {}
    start, family = 1, FAMILIES[shape.architecture]
    for name, size in hf_shapes(shape, family).items():
        if name in constants(shape, family):
            continue
        count = prod(size)
        arrays[name] = np.arange(start, start + count, dtype=np.int32).reshape(size)
        start += count
    return arrays


def built(shards: Sequence[Shard], hf: Arrays) -> dict[int, Arrays]:
    """id of a shard's params -> its parameters, 2-D or 1-D, made from the HF tensors; padding holds 0."""
    made: dict[int, Arrays] = {}
    for shard in shards:
        if id(shard.params) not in made:
            made[id(shard.params)] = {param.name: _assembled(param, hf) for param in shard.params}
    return made


def _assembled(param: LocalParam, hf: Arrays) -> np.ndarray:
    flat = len(param.shape) == 1
    local = np.zeros(param.shape if flat else (prod(param.shape[:-1]), param.shape[-1]), np.int32)
    top = 0
    for block in param.blocks:
        end = top + block.num_rows
        rows = hf[block.hf_name][block.rows[0] : block.rows[1]]
        local[top:end] = rows if block.cols is None else rows[:, block.cols[0] : block.cols[1]]
        top = end
    return local


def simulate(
    plan: Plan, trainers: Sequence[Shard], engines: Sequence[Shard], export: dict[int, Arrays]
) -> tuple[dict[int, Arrays], dict[int, int], dict[int, int]]:
    """Run the plan's moves on arrays: each engine process's parameters, which start as zeros, the elements that were
    written into them, and those that it received. export: built(both sides). A source that sends what it does not have
    yet sends zeros.
    """
    index = {id(shard.params): BlockIndex(shard.params) for shard in (*trainers, *engines)}
    held = {shard.rank: (export[id(shard.params)], index[id(shard.params)]) for shard in trainers}
    got = {
        shard.rank: (
            {name: np.zeros_like(one) for name, one in export[id(shard.params)].items()},
            index[id(shard.params)],
        )
        for shard in engines
    }
    written = {shard.rank: 0 for shard in engines}
    received = dict(written)
    for move in plan.moves:
        source, where = (held if move.wave == 0 else got)[move.source]
        buffer = np.zeros(move.numel, np.int32)
        if move.cols is not None:
            buffer = buffer.reshape(move.rows[1] - move.rows[0], -1)
        for place in where.places(move):
            if place.cols is None:
                buffer[place.at_rows] = source[place.param][place.rows]
            else:
                buffer[place.at_rows, place.at_cols] = source[place.param][place.rows, place.cols]
        target, where = got[move.target]
        for place in where.places(move):
            if place.cols is None:
                part = buffer[place.at_rows]
                target[place.param][place.rows] = part
            else:
                part = buffer[place.at_rows, place.at_cols]
                target[place.param][place.rows, place.cols] = part
            written[move.target] += part.size
        received[move.target] += 0 if move.source == move.target else move.numel
    return {rank: arrays for rank, (arrays, _) in got.items()}, written, received
