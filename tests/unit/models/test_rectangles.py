"""A flat range as rectangles; and over all ranks of a layout, each number of each tensor once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod

import numpy as np
import pytest

from megatron_rl.models import FAMILIES
from megatron_rl.models.layouts import Block
from megatron_rl.models.rectangles import Span, even_part, padding, place_among_copies, rectangles
from megatron_rl.models.rules import LocalParam, constants, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.topology import Coords, Topology
from megatron_rl.reshard.shards import trainer_params
from tests.helpers.reshard_cases import shape_of

QKV = LocalParam("qkv", (6, 3), (Block("q", (4, 6), (0, 3)), Block("k", (1, 3), (0, 3))))


def _cells(param: LocalParam, span: Span, most: int | None = None) -> list[tuple[str, int, int]]:
    """What the rectangles of a range cover, in the order of the range: (tensor, row, column)."""
    cells: list[tuple[str, int, int]] = []
    at = None
    for one in rectangles(param, span, most):
        assert at is None or one.start >= at
        assert prod(one.sizes) <= max(most or 10**9, param.shape[-1])
        at = one.end
        rows, cols = (*one.sizes, 1)[:2]
        top, left = (*one.offsets, 0)[:2]
        cells += [(one.hf_name, top + row, left + col) for row in range(rows) for col in range(cols)]
    return cells


def test_a_range_within_rows_is_three_x_a_block():
    param = LocalParam("w", (4, 3), (Block("w", (8, 12), (0, 3)),))
    got = [(one.offsets, one.sizes, one.start) for one in rectangles(param, (2, 11))]
    assert got == [((8, 2), (1, 1), 2), ((9, 0), (2, 3), 3), ((11, 0), (1, 2), 9)]


@pytest.mark.parametrize("most", [None, 1, 3, 7])
def test_every_range_is_covered_once_and_in_order(most: int | None):
    whole = [("q", row, col) for row in (4, 5) for col in range(3)]
    whole += [("k", row, col) for row in (1, 2) for col in range(3)]
    for start in range(19):
        for end in range(start, 19):
            assert _cells(QKV, (start, end), most) == whole[start:end], (start, end)


def test_padding_is_what_lies_past_the_last_block():
    assert padding(QKV, (0, 18)) == (12, 18)
    assert padding(QKV, (3, 10)) == (12, 12)
    assert padding(QKV, (14, 17)) == (14, 17)


def test_even_parts_cover_a_range_and_copies_are_counted():
    parts = [even_part((5, 16), index, 4) for index in range(4)]
    assert [part[0] for part in parts] + [16] == [5] + [part[1] for part in parts]
    assert max(end - start for start, end in parts) - min(end - start for start, end in parts) <= 1
    same = LocalParam("norm", (4,), (Block("norm", (0, 4)),))
    other = LocalParam("norm", (4,), (Block("norm", (4, 8)),))
    assert [place_among_copies([same, other, same], rank) for rank in range(3)] == [(0, 2), (0, 1), (1, 2)]


def _stages(shape: ModelShape, pp: int, vpp: int) -> list[list[range]]:
    cuts = [shape.num_layers * number // (pp * vpp) for number in range(pp * vpp + 1)]
    return [[range(cuts[c * pp + s], cuts[c * pp + s + 1]) for c in range(vpp)] for s in range(pp)]


def _random_cuts(chance: random.Random, size: int, count: int) -> list[Span]:
    """As the distributed optimizer deals a parameter: ranges anywhere, some of them empty."""
    edges = sorted(chance.randint(0, size) for _ in range(count - 1))
    return list(zip([0, *edges], [*edges, size], strict=True))


def _layouts(shape: ModelShape) -> Iterator[tuple[Topology, int]]:
    yield from ((Topology(4), 1), (Topology(2, tp=2), 1), (Topology(4, tp=2), 1), (Topology(4, cp=2), 1))
    yield from ((Topology(4, pp=2), 1), (Topology(2, pp=2), 2), (Topology(8, tp=2, pp=2), 1))
    if shape.num_experts:
        yield from ((Topology(4, ep=2), 1), (Topology(4, ep=2, tp=2, etp=1), 1), (Topology(4, ep=2, tp=2), 1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_all_ranks_of_a_layout_write_each_number_once(architecture: str, tied: bool):
    """Whatever ranges the distributed optimizer gives the ranks. The vocabulary does not divide by tp."""
    shape, family = shape_of(architecture, layers=4, vocab=71, tied=tied), FAMILIES[architecture]
    for number, (topology, vpp) in enumerate(_layouts(shape)):
        sizes = {name: size for name, size in hf_shapes(shape, family).items() if name not in constants(shape, family)}
        counts = {tensor: np.zeros(size, np.int32) for tensor, size in sizes.items()}
        stages = _stages(shape, topology.pp, vpp)
        params = [trainer_params(shape, family, topology, stages, rank) for rank in range(topology.world)]
        for rank in range(topology.world):
            for place, param in enumerate(params[rank]):
                if shape.tie_word_embeddings and param.name.endswith(family.output.megatron):
                    continue
                chance = random.Random(f"{number} {param.name} {_owners(topology, rank, param.expert)}")
                shards, index = _group(topology, rank, param.expert)
                replicas, replica = _owners(topology, rank, param.expert)[1], _replica(topology, rank, param.expert)
                owned = _random_cuts(chance, prod(param.shape), replicas)[replica]
                copies = place_among_copies([params[shard][place] for shard in shards], index)
                for one in rectangles(param, even_part(owned, *copies), 64):
                    at = tuple(slice(o, o + s) for o, s in zip(one.offsets, one.sizes, strict=True))
                    counts[one.hf_name][at] += 1
        assert all((count == 1).all() for count in counts.values()), (topology, vpp)


def _group(topology: Topology, rank: int, expert: bool) -> tuple[list[int], int]:
    """The ranks that together hold one copy of a parameter, in order, and which of them `rank` is."""
    if expert:
        at = topology.expert_coords(rank)
        first = rank - (at.etp + topology.expert_tp * at.ep)
        return list(range(first, first + topology.expert_tp * topology.ep)), rank - first
    at = topology.coords(rank)
    return [topology.rank(Coords(tp, at.cp, at.dp, at.pp)) for tp in range(topology.tp)], at.tp


def _owners(topology: Topology, rank: int, expert: bool) -> tuple[object, int]:
    """What the ranks that share a parameter's update have in common, and how many they are."""
    if expert:
        at = topology.expert_coords(rank)
        # Ranks that share experts have equal buffers, and so equal cuts of what each of them has whole.
        return (at.ep, at.pp), topology.edp
    at = topology.coords(rank)
    return at.pp, topology.dp * topology.cp


def _replica(topology: Topology, rank: int, expert: bool) -> int:
    if expert:
        return topology.expert_coords(rank).edp
    at = topology.coords(rank)
    return at.dp * topology.cp + at.cp
