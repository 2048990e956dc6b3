"""Links between ranks: what is said of one, and who meets whom when all are measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["within", "between"]
"""Ranks of one node, or of two."""
MOST_ROUNDS = 8
"""Nodes that each node is measured against."""


@dataclass(frozen=True)
class Link:
    """Two ranks that exchanged data."""

    kind: Kind
    ranks: tuple[int, int]
    gbps: float | None
    """Gbit/s in each direction, both at once; None where the exchange did not end."""
    trouble: str = ""


@dataclass(frozen=True)
class LinkPlan:
    """What the ranks of a run exchange. Rank r is on node r // ranks_a_node."""

    device: Literal["cpu", "cuda"]
    nodes: int
    ranks_a_node: int
    address: str
    """Of rank 0's node, where the store is."""
    port: int
    """Of the store."""

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_a_node


@dataclass(frozen=True)
class Measured:
    """What one rank measured."""

    links: tuple[Link, ...]
    """Those of which it is the lower rank; and those that did not end."""
    all_reduce_gbps: float | None
    trouble: str = ""
    """Why the rank stopped before the end; "" where it did not."""


def meetings(plan: LinkPlan, rank: int) -> Iterator[tuple[Kind, int | None]]:
    """(kind of link, the rank met or None) of each round, for one rank: first its own node, then the others.

    On CPU one rank a node measures for all: they share what is measured.
    """
    node, local = divmod(rank, plan.ranks_a_node)
    if plan.device == "cuda":
        for pairs in pairings(plan.ranks_a_node, plan.ranks_a_node):
            peer = _partner(pairs, local)
            yield "within", None if peer is None else node * plan.ranks_a_node + peer
    for pairs in pairings(plan.nodes, MOST_ROUNDS):
        peer = _partner(pairs, node) if plan.device == "cuda" or local == 0 else None
        yield "between", None if peer is None else peer * plan.ranks_a_node + local


def _partner(pairs: Sequence[tuple[int, int]], one: int) -> int | None:
    return next((first + second - one for first, second in pairs if one in (first, second)), None)


def pairings(count: int, most: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of `count` meets another, nobody the same twice: a tournament, or `most` rounds of it spread
    over the whole. One is left over in each round if count is odd.
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    size, rounds = len(places), list[list[tuple[int, int]]]()
    for turn in range(size - 1):
        turned = places[:1] + places[1 + turn :] + places[1 : 1 + turn]
        pairs = [(turned[at], turned[size - 1 - at]) for at in range(size // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
    step = max(1, -(-len(rounds) // most))
    return rounds[::step]
