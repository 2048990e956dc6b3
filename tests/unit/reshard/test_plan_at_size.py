"""What a rank does to get ready for a sync grows with its own moves, not with everyone's.

benchmarks/plan.py measures real models on a thousand GPUs; here the same code is counted on small ones.
"""

from __future__ import annotations

import cProfile
import pstats
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import LocalParam
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.plan import Plan, RankPlan, Shard, make_plan
from megatron_rl.reshard.rounds import Round, rounds_of_rank
from megatron_rl.reshard.shards import EngineLayout, engine_shards, trainer_shards
from tests.helpers.reshard_cases import shape_of

Made = TypeVar("Made")
EP = 8


def _counted(make: Callable[[], Made]) -> tuple[Made, int]:
    """What a function returns, and its calls of functions: the same on every machine."""
    profile = cProfile.Profile()
    made = profile.runcall(make)
    return made, pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def _shape(experts: int, layers: int = 2) -> ModelShape:
    return shape_of("Qwen3MoeForCausalLM", layers=layers, heads=8, kv=8, hidden=8, ffn=8, vocab=64, experts=experts)


def _sides(shape: ModelShape, world: int) -> tuple[list[Shard], list[Shard]]:
    """EP 8 to engines of TP 2, as Qwen3-30B-A3B on any number of GPUs."""
    family = FAMILIES[shape.architecture]
    trainers = trainer_shards(shape, family, Topology(world, ep=EP), [[range(shape.num_layers)]])
    return trainers, engine_shards(shape, family, EngineLayout(2, 1, tuple(range(world))))


@dataclass(frozen=True)
class Ready:
    """One rank that is ready, and the calls that it took: of the plan, and of the rank's own part of it."""

    plan: Plan
    part: RankPlan
    rounds: list[Round]
    plan_calls: int
    part_calls: int


def _own_part(plan: Plan, rank: int) -> tuple[RankPlan, list[Round]]:
    part = plan.of_rank(rank)
    return part, rounds_of_rank(part, len(plan.loads.ranks), element_size=lambda wave: 2, cap_bytes=1 << 12)


def _ready(shape: ModelShape, world: int) -> Ready:
    trainers, engines = _sides(shape, world)
    plan, plan_calls = _counted(lambda: make_plan(trainers, engines, node_of=lambda rank: rank // 8))
    (part, rounds), part_calls = _counted(lambda: _own_part(plan, world // 2 + 3))
    return Ready(plan, part, rounds, plan_calls, part_calls)


def _moves(part: RankPlan) -> int:
    return len(part.local) + len(part.sends) + len(part.receives)


def test_a_rank_does_no_more_on_more_gpus() -> None:
    """The moves of all ranks grow 16 times; those of one rank, its rounds, and what it does for them do not."""
    small, large = (_ready(_shape(experts=64), world) for world in (8, 128))
    assert len(large.plan.moves) == 16 * len(small.plan.moves)
    assert _moves(large.part) == _moves(small.part) > 500
    assert len(large.rounds) == len(small.rounds)
    assert large.part_calls < 1.1 * small.part_calls
    # The plan is of all ranks, by bundles of tensors: per rank it takes a share of what one rank's own moves take.
    assert (large.plan_calls - small.plan_calls) / 120 < 0.2 * small.part_calls


def test_what_a_rank_does_for_each_of_its_moves_stays_the_same() -> None:
    """Four times as many experts, and four times as many layers."""
    small, experts, layers = (_ready(shape, 16) for shape in (_shape(64), _shape(256), _shape(64, layers=8)))
    for large in (experts, layers):
        assert 3.5 < _moves(large.part) / _moves(small.part) < 4.5
        assert 3.5 < len(large.rounds) / len(small.rounds) < 4.5
        assert large.part_calls / _moves(large.part) < 1.2 * small.part_calls / _moves(small.part)
        assert large.plan_calls < 4.5 * small.plan_calls


class _Watched(tuple[LocalParam, ...]):
    """Parameters that count how often they are gone through."""

    read = 0

    def __iter__(self) -> Iterator[LocalParam]:
        _Watched.read += 1
        return super().__iter__()


def test_replicas_are_not_looked_at_one_by_one() -> None:
    """What replicas share is read once for all of them."""
    read: dict[int, int] = {}
    for world in (16, 256):
        trainers, engines = _sides(_shape(64), world)
        _Watched.read = 0
        watched: dict[int, _Watched] = {}
        sides = [
            [Shard(one.rank, watched.setdefault(id(one.params), _Watched(one.params))) for one in side]
            for side in (trainers, engines)
        ]
        start = _Watched.read
        assert make_plan(*sides, node_of=lambda rank: rank // 8, dtypes=("read", "")).num_waves == 1
        read[world] = _Watched.read - start
    assert read[256] == read[16] <= 4 * (EP + 2)


def test_the_memory_of_a_rank_grows_with_its_own_moves() -> None:
    sizes: dict[int, float] = {}
    for world in (8, 128):
        trainers, engines = _sides(_shape(64), world)
        plan = make_plan(trainers, engines, node_of=lambda rank: rank // 8, dtypes=("memory", ""))
        tracemalloc.start()
        part, rounds = _own_part(plan, 3)
        sizes[world] = tracemalloc.get_traced_memory()[1] / _moves(part)
        tracemalloc.stop()
        assert rounds
    assert sizes[128] < 1.1 * sizes[8] and sizes[8] < 1000, "bytes a move"
