"""The plan of a weight sync: complete, exactly once, least bytes, over random layouts of both sides."""

from __future__ import annotations

from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ReshardError
from megatron_rl.models import FAMILIES
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam, hf_shapes
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.bundles import Trainers, kind_bundles, placed
from megatron_rl.reshard.plan import Move, RankPlan, Shard, bundles_of, make_plan, places
from megatron_rl.reshard.rank_order import best_order, colocated_layout, overlaps_of
from megatron_rl.reshard.shards import EngineLayout, engine_shards, trainer_shards, whole_shards
from megatron_rl.reshard.solve import Bundle, Loads, prove, solve
from megatron_rl.reshard.tables import ModelTable
from tests.helpers.reshard_cases import (
    QUIET,
    Arrays,
    Case,
    built,
    cases,
    hf_arrays,
    overlaps,
    searched,
    shape_of,
    simulate,
)


def least(held: Arrays, needed: Arrays, count: int) -> int:
    """Elements in `needed` and not in `held`, by the sets of their numbers, which are 1 to `count`."""
    lacks = np.zeros(count + 1, bool)
    for values in needed.values():
        lacks[values] = True
    for values in held.values():
        lacks[values] = False
    return int(np.count_nonzero(lacks[1:]))


def chained(part: RankPlan) -> tuple[Move, ...]:
    return (*part.local, *part.sends, *part.receives)


def block_sizes(shard: Shard) -> list[int]:
    return [
        block.num_rows * (1 if block.cols is None else block.cols[1] - block.cols[0])
        for param in shard.params
        for block in param.blocks
    ]


@settings(QUIET, max_examples=1000)
@given(case=cases())
def test_w3_w4_every_engine_byte_is_written_once_from_the_export_and_no_byte_more_is_sent(case: Case) -> None:
    """W3, W4: any family, TP x PP x VPP x uneven x EP x ETP x DP against TP x EP x DP, colocated or not."""
    trainers, engines = case.trainers(), case.engines()
    plan = make_plan(trainers, engines, node_of=case.node_of)
    hf = hf_arrays(case.shape)
    export = built((*trainers, *engines), hf)
    got, written, received = simulate(plan, trainers, engines, export)
    by_rank = {shard.rank: export[id(shard.params)] for shard in trainers}
    known: dict[tuple[int, int], int] = {}
    for shard in engines:
        wanted, held = export[id(shard.params)], by_rank.get(shard.rank, {})
        for name, values in wanted.items():
            assert np.array_equal(values, got[shard.rank][name]), (shard.rank, name)
        # All bytes are right and as many were written as there are: each was written once.
        assert written[shard.rank] == sum(block_sizes(shard))
        key = id(wanted), id(held) if held else 0
        if key not in known:
            known[key] = least(held, wanted, sum(values.size for values in hf.values()))
        counts = plan.bytes_of(shard.rank, 2)
        assert counts.moved == counts.minimum == 2 * known[key] == 2 * received[shard.rank]
        assert counts.local + counts.moved == counts.needed
    assert sum(plan.loads.sent.values()) == sum(plan.loads.moved.values())


@settings(QUIET, max_examples=100)
@given(case=cases(whole=False))
def test_the_accounting_of_bundles_and_the_plan_of_every_tensor_agree_on_each_process(case: Case) -> None:
    engine = case.engine
    table = ModelTable(case.shape, FAMILIES[case.shape.architecture])
    bundles = kind_bundles(table, Trainers(case.topology, case.stages), tp=engine.tp, ep=engine.ep)
    plan = make_plan(case.trainers(), case.engines(), node_of=case.node_of)
    loads = Loads(plan.loads.placement)
    solved = list(solve(placed(bundles, engine), loads))
    assert loads == plan.loads
    assert sum(len(one.moves) * one.count for one in solved) == len(plan.moves)


@settings(QUIET, max_examples=50)
@given(case=cases(whole=False))
def test_both_ends_of_a_link_see_its_moves_in_the_same_order(case: Case) -> None:
    trainers, engines = case.trainers(), case.engines()
    plan = make_plan(trainers, engines, node_of=case.node_of)
    # Another process may list the shards in another order, and without sharing them.
    apart = [Shard(shard.rank, (*shard.params,)) for shard in reversed(engines)]
    again = make_plan(trainers[::-1], apart, node_of=case.node_of, dtypes=("float32", ""))
    assert again.moves == plan.moves
    assert sorted(plan.moves) == sorted({move for rank in plan.loads.ranks for move in chained(plan.of_rank(rank))})
    parts = {rank: plan.of_rank(rank) for rank in plan.loads.ranks}
    for source, part in parts.items():
        for target in {move.target for move in part.sends}:
            sent = [move for move in part.sends if move.target == target]
            assert sent == [move for move in parts[target].receives if move.source == source]
            assert [move.wave for move in sent] == sorted(move.wave for move in sent)


def test_disaggregated_trainers_send_one_copy_however_many_engines_there_are() -> None:
    shape = shape_of(layers=4, kv=4, heads=4)
    family = FAMILIES[shape.architecture]
    trainers = trainer_shards(shape, family, Topology(2, tp=2), [[range(4)]])
    model = sum(prod(size) for size in hf_shapes(shape, family).values())
    for replicas in (1, 2, 4):
        engines = engine_shards(shape, family, EngineLayout(2, 1, tuple(range(2, 2 + 2 * replicas))))
        plan = make_plan(trainers, engines, node_of=lambda rank: rank // 2)
        # A norm is whole on both trainers, and both send it while no engine has it.
        assert sum(plan.loads.sent[rank] for rank in (0, 1)) <= model + 9 * shape.hidden_size
        engine_sends = [plan.loads.sent[shard.rank] for shard in engines]
        assert max(engine_sends) <= 1.6 * max(plan.loads.needed.values())
        assert plan.num_waves == {1: 1, 2: 2, 4: 3}[replicas]


def test_replicas_in_other_nodes_get_a_byte_through_one_process_of_the_node() -> None:
    shape = shape_of(layers=2, kv=4, heads=4)
    family = FAMILIES[shape.architecture]
    trainers = trainer_shards(shape, family, Topology(8, tp=4, pp=2), [[range(1)], [range(1, 2)]])
    plan = make_plan(
        trainers, engine_shards(shape, family, EngineLayout(1, 1, tuple(range(8)))), node_of=lambda r: r // 4
    )
    model = sum(prod(size) for size in hf_shapes(shape, family).values())
    far = [move for move in plan.moves if move.source // 4 != move.target // 4]
    assert sum(move.numel for move in far) == model
    assert {move.wave for move in far} == {0} and plan.num_waves == 2


def test_a_process_on_the_same_gpu_comes_before_others_of_the_node() -> None:
    whole = (LocalParam("w", (4, 2), (Block("t", (0, 4), (0, 2)),)),)
    plan = make_plan(
        [Shard(0, whole), Shard(1, whole)], [Shard(2, whole), Shard(3, whole)], gpu_of=lambda r: r in (0, 3)
    )
    assert sorted((move.source, move.target) for move in plan.moves) == [(0, 3), (1, 2)]
    plan = make_plan([Shard(0, whole), Shard(1, whole)], [Shard(2, whole)], gpu_of=lambda r: r % 2 if r != 2 else 1)
    assert [(move.source, move.target) for move in plan.moves] == [(1, 2)]


def test_a_byte_that_no_trainer_holds_is_named() -> None:
    """W3."""
    held = Shard(0, (LocalParam("chunk0.w", (4, 2), (Block("t", (0, 4), (0, 2)),)),))
    needed = Shard(1, (LocalParam("w", (6, 2), (Block("t", (0, 6), (0, 2)),)),))
    with pytest.raises(ReshardError, match=r"t rows 4:6 cols 0:2 is needed by engine ranks, but on no trainer rank"):
        make_plan([held], [needed])
    with pytest.raises(ReshardError, match=r"t rows 4:6 cols 0:2 is on trainer ranks, but on no engine rank"):
        make_plan([Shard(0, needed.params)], [Shard(1, held.params)])
    with pytest.raises(ReshardError, match=r"t is needed by engine ranks, but on no trainer rank; u is on trainer"):
        make_plan([Shard(0, (LocalParam("w", (4,), (Block("u", (0, 4)),)),))], [needed])


def test_blocks_that_do_not_fit_their_parameter_are_named() -> None:
    good = Shard(0, (LocalParam("w", (4, 2), (Block("t", (0, 4), (0, 2)),)),))
    for shape, reason in (((3, 2), "has 3 rows"), ((4, 3), "shapes differ"), ((4,), "shapes differ")):
        bad = Shard(1, (LocalParam("fused", shape, good.params[0].blocks),))
        with pytest.raises(ReshardError, match=f"process 1: fused .*{reason}"):
            make_plan([good], [bad])
    with pytest.raises(ReshardError, match="each listed once"):
        make_plan([good, good], [Shard(1, good.params)])


def test_the_proof_refuses_every_kind_of_wrong_move() -> None:
    """W3, W4: it reads the bundle alone, so it catches what the choice of moves may get wrong."""
    halves = [(0, 2, 0, 2), (2, 4, 0, 2)]
    bundle = Bundle(("t",), 1, {(halves[0],): (0,), (halves[1],): (1,)}, {((0, 4, 0, 2),): (0, 2)}, flat=False)
    right = [(halves[0], 0, 0, 0), (halves[1], 1, 0, 0), (halves[0], 0, 2, 0), (halves[1], 0, 2, 1)]
    prove(bundle, right)
    wrong = {
        "no move writes it": right[:3],
        "written twice": [*right, right[0]],
        "process 1 receives it|processes .1. receive it": [*right, (halves[0], 0, 1, 0)],
        "does not need it": [*right, ((4, 5, 0, 2), 1, 0, 0)],
        "before it has it": [*right[:3], (halves[1], 0, 2, 0)],
        "receives 8 elements, the minimum is 4": [(halves[0], 1, 0, 0), *right[1:]],
    }
    for reason, moves in wrong.items():
        with pytest.raises(ReshardError, match=reason):
            prove(bundle, moves)


def test_digests_differ_with_all_that_a_plan_is_made_from_and_plans_are_kept() -> None:
    """W5."""
    shape = shape_of()
    family = FAMILIES[shape.architecture]
    trainers = trainer_shards(shape, family, Topology(2, tp=2), [[range(2)]])
    engines = whole_shards(shape, family, [0, 1])
    plan = make_plan(trainers, engines)
    assert make_plan(list(reversed(trainers)), engines).digest == plan.digest
    assert make_plan(trainers, engines) is plan
    other = shape_of(vocab=71)
    other_trainers = trainer_shards(other, family, Topology(2, tp=2), [[range(2)]])
    moved = [Shard(shard.rank, shard.params[1:] + shard.params[:1]) for shard in engines]
    digests = {
        plan.digest,
        make_plan(trainers, engines, dtypes=("float32", "bfloat16")).digest,
        make_plan(trainers, engines, node_of=lambda rank: rank).digest,
        make_plan(trainers, whole_shards(shape, family, [0])).digest,
        make_plan(trainers, moved).digest,
        make_plan(other_trainers, whole_shards(other, family, [0, 1])).digest,
    }  # fmt: skip
    assert len(digests) == 6


def test_the_worked_example_of_the_document() -> None:
    def rows(rank: int, first: int, last: int) -> Shard:
        return Shard(rank, (LocalParam("w", (last - first, 4), (Block("W", (first, last), (0, 4)),)),))

    def moves(trainers: list[Shard], engines: list[Shard]) -> list[tuple[tuple[int, int], int, int, int]]:
        return [(move.rows, move.source, move.target, move.wave) for move in make_plan(trainers, engines).moves]

    halves = [rows(0, 0, 4), rows(1, 4, 8)]
    assert moves(halves, [rows(0, 0, 8), rows(1, 0, 8)]) == [
        ((0, 4), 0, 0, 0), ((0, 4), 0, 1, 0), ((4, 8), 1, 0, 0), ((4, 8), 1, 1, 0),
    ]  # fmt: skip
    four = [*halves, rows(2, 0, 4), rows(3, 4, 8)]
    bundles, _ = bundles_of(four, [rows(kind, 2 * kind, 2 * kind + 2) for kind in range(4)])
    order = best_order(overlaps_of(bundles, range(4), 4), range(4), num_kinds=4, gpus_per_node=4)
    assert order == (0, 2, 1, 3)
    quarters = [rows(rank, 2 * slot, 2 * slot + 2) for slot, rank in enumerate(order)]
    assert all(source == target for _, source, target, _ in moves(four, quarters))
    natural = make_plan(four, [rows(slot, 2 * slot, 2 * slot + 2) for slot in range(4)])
    assert [natural.loads.moved[rank] for rank in range(4)] == [0, 8, 8, 0]
    assert moves(halves, [rows(2, 0, 4), rows(3, 4, 8), rows(4, 0, 4), rows(5, 4, 8)]) == [
        ((0, 4), 0, 2, 0), ((4, 8), 1, 3, 0), ((0, 4), 2, 4, 1), ((4, 8), 3, 5, 1),
    ]  # fmt: skip


def test_places_find_all_pieces_of_a_rectangle() -> None:
    blocks = (Block("q", (0, 2), (0, 3)), Block("k", (0, 1), (0, 3)), Block("q", (2, 4), (0, 3)))
    params = [LocalParam("qkv", (5, 3), blocks), LocalParam("copy", (4, 3), (Block("q", (0, 4), (0, 3)),))]
    found = places(params, Move("q", (1, 4), (1, 3), 0, 1, 0))
    assert [(one.param, one.rows, one.cols, one.at_rows, one.at_cols) for one in found] == [
        ("qkv", slice(1, 2), slice(1, 3), slice(0, 1), slice(0, 2)),
        ("qkv", slice(3, 5), slice(1, 3), slice(1, 3), slice(0, 2)),
        ("copy", slice(1, 4), slice(1, 3), slice(0, 3), slice(0, 2)),
    ]
    stack = [LocalParam("w2", (2, 3, 4), (Block("a", (0, 3), (4, 8)), Block("b", (0, 3), (4, 8))))]
    assert places(stack, Move("b", (0, 3), (6, 8), 0, 0, 0))[0].rows == slice(3, 6)
    assert places(stack, Move("b", (0, 3), (0, 4), 0, 0, 0)) == []


def test_strided_groups_fall_out_of_the_search() -> None:
    """HybridFlow's example: TP 8 trains, TP 2 generates; neighbours as engine ranks receive a sixth more."""
    shape = shape_of(heads=8, kv=8, vocab=64)
    trainers = [[range(2)]]
    order = searched(shape, Topology(8, tp=8), trainers, tp=2, ep=1, per_node=8)
    assert order == (0, 4, 1, 5, 2, 6, 3, 7)
    table = ModelTable(shape, FAMILIES[shape.architecture])
    layout = colocated_layout(table, Trainers(Topology(8, tp=8), trainers), tp=2, gpus_per_node=8)
    assert layout == EngineLayout(2, 1, order)
    rows = overlaps(shape, Topology(8, tp=8), trainers, tp=2)
    assert best_order(rows, range(8), num_kinds=2, gpus_per_node=8, ascending=True) == order
    # A trainer of TP 4 x PP 2 holds quarters, an engine of TP 8 needs eighths: equal quarters become neighbours, which
    # no ascending order can do.
    stages = [[range(1)], [range(1, 2)]]
    assert searched(shape, Topology(8, tp=4, pp=2), stages, tp=8, ep=1, per_node=8) == (0, 4, 1, 5, 2, 6, 3, 7)
    rows = overlaps(shape, Topology(8, tp=4, pp=2), stages, tp=8)
    assert best_order(rows, range(8), num_kinds=8, gpus_per_node=8, ascending=True) == tuple(range(8))
    # Where the natural order is best it stays: TP 4 x PP 2 to TP 4.
    assert searched(shape, Topology(8, tp=4, pp=2), [[range(1)], [range(1, 2)]], tp=4, ep=1, per_node=8) == tuple(
        range(8)
    )


@settings(QUIET, max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=3, max_size=6).filter(
        lambda r: len(r) in (3, 6)
    )
)
def test_the_search_is_as_good_as_trying_all_orders(rows: list[list[int]]) -> None:
    ranks = tuple(range(len(rows)))
    order = best_order(dict(enumerate(rows)), ranks, num_kinds=3, gpus_per_node=len(rows))
    gain = sum(rows[rank][slot % 3] for slot, rank in enumerate(order))
    assert sorted(order) == list(ranks)
    assert gain == max(sum(rows[rank][slot % 3] for slot, rank in enumerate(one)) for one in permutations(ranks))
