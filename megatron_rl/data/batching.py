"""Plans: which sequence goes to which mini-batch, data-parallel rank and micro-batch. Pure integers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_rl.errors import DataError

# Karmarkar-Karp up to this many items x lists (some 50 ms); above, the quicker method.
_DIFFERENCING_CELLS = 1 << 15

MicroBatches = tuple[tuple[int, ...], ...]
"""Sequence numbers of each micro-batch of one rank"""


@dataclass(frozen=True)
class BatchPlan:
    """Which sequences make up each mini-batch, on each data-parallel rank, in each micro-batch.

    minis[i][d][j] = sequence numbers. All ranks have the same number of micro-batches in a mini-batch (a collective
    or a pipeline needs that); one may be empty.

    Example: 4 sequences, 2 mini-batches, dp 2 -> (((0,),), ((1,),)), (((2,),), ((3,),))
    """

    minis: tuple[tuple[MicroBatches, ...], ...]

    def passes(self) -> list[MicroBatches]:
        """[dp][j]: every micro-batch of each rank, mini-batch after mini-batch: the shapes of a forward-only pass."""
        return [tuple(micro for rank in ranks for micro in rank) for ranks in zip(*self.minis, strict=True)]

    def keep(self, kept: torch.Tensor) -> BatchPlan:
        """The plan without the sequences where kept [S] is False; every micro-batch stays, though maybe empty."""
        flags = kept.tolist()

        def thin(micro: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(s for s in micro if flags[s])

        return BatchPlan(tuple(tuple(tuple(thin(m) for m in rank) for rank in mini) for mini in self.minis))


def sequence_cost(length: int) -> float:
    """Relative compute of a sequence: linear layers, and attention's quadratic term (about equal at 24,576 tokens for
    hidden sizes in the thousands)."""
    return length * (1.0 + length / 24576.0)


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices in num_parts lists of near-equal total cost, by largest differencing (Karmarkar and Karp 1982)."""
    if num_parts == 1:
        return [list(range(len(costs)))]
    count = len(costs)
    if count == 0:
        return [[] for _ in range(num_parts)]
    # A state is the sums of num_parts lists, from heavy to light: at first an item and empty lists. Which list an item
    # ends in follows from the merges, from the last one down.
    sums = [np.zeros(num_parts) for _ in costs]
    for state, cost in zip(sums, costs, strict=True):
        state[0] = cost
    merges: list[tuple[int, int, npt.NDArray[np.int64]]] = []
    heap = [(-cost, number) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        merged = sums[left] + sums[right][::-1]
        order = np.argsort(-merged, kind="stable")
        merges.append((left, right, order))
        sums.append(merged[order])
        heapq.heappush(heap, (float(sums[-1][-1] - sums[-1][0]), len(sums) - 1))
    lists: list[list[int]] = [[] for _ in range(num_parts)]
    # Of each state, the final list that each of its lists is in.
    final = {heap[0][1]: np.arange(num_parts)}
    for number in range(len(sums) - 1, count - 1, -1):
        left, right, order = merges[number - count]
        of_left = np.empty_like(order)
        of_left[order] = final.pop(number)
        final[left], final[right] = of_left, of_left[::-1]
    for item in range(count):
        lists[final[item][0]].append(item)
    return lists


def longest_first(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices in num_parts lists of near-equal total cost: each item, from heavy to light, goes to the lightest list
    (Graham 1969). O(n log n + n log k), where karmarkar_karp is O(n k log k); as good when lists are long.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heap[0]
        parts[part].append(i)
        heapq.heapreplace(heap, (load + costs[i], part))
    return [sorted(parts[part]) for _, part in sorted(heap, reverse=True)]


def balanced(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices in num_parts lists of near-equal total cost, heavy lists first (so that ranks which exchange tokens meet
    at like work), by the better method that is quick at this size.
    """
    method = karmarkar_karp if len(costs) * num_parts <= _DIFFERENCING_CELLS else longest_first
    return method(costs, num_parts)


@dataclass(frozen=True)
class _Caps:
    """What a micro-batch may hold. packed: whether its sequences lie end to end or are padded to the longest."""

    max_tokens: int
    max_seqs: int
    packed: bool

    def admits(self, lens: Sequence[int]) -> bool:
        tokens = sum(lens) if self.packed else len(lens) * max(lens, default=0)
        return tokens <= self.max_tokens and len(lens) <= self.max_seqs


def _micro_batches(members: Sequence[int], seq_lens: Sequence[int], at_least: int, caps: _Caps) -> MicroBatches:
    """Balanced micro-batches of `members`, at least `at_least` of them, each within the caps."""
    tokens = sum(seq_lens[s] for s in members)
    count = max(at_least, -(-tokens // caps.max_tokens), -(-len(members) // caps.max_seqs))
    costs = [sequence_cost(seq_lens[s]) for s in members]
    while True:
        parts = [[members[i] for i in part] for part in balanced(costs, count)]
        if all(caps.admits([seq_lens[s] for s in part]) for part in parts):
            return tuple(map(tuple, parts))
        count += 1


def _common_count(
    ranks: Sequence[Sequence[int]], seq_lens: Sequence[int], multiple: int, caps: _Caps
) -> tuple[MicroBatches, ...]:
    """Micro-batches of each rank, the same number on all, a multiple of `multiple`."""
    count = multiple
    plans: list[MicroBatches] = [()] * len(ranks)
    while any(len(plan) != count for plan in plans):
        for d, rank in enumerate(ranks):
            if len(plans[d]) != count:
                # Starting where the ranks before ended, so that most ranks are planned once.
                plans[d] = _micro_batches(rank, seq_lens, count, caps)
                count = -(-len(plans[d]) // multiple) * multiple
    return tuple(plans)


def assign_ranks(seq_lens: Sequence[int], minis_by_role: Sequence[Sequence[int]], dp: int) -> list[int]:
    """[S] the data-parallel rank of each sequence, the same for every role (actor, critic).

    minis_by_role: for each role, [S] number of each sequence's mini-batch. Sequences that share a mini-batch in every
    role are balanced over the ranks by themselves, so each role's mini-batches are balanced too. A rank that has less
    of the mini-batches under way gets the heavier share. One role, or roles with equal mini-batches: each mini-batch
    is balanced alone.

    Example: mini-batches of 2 and of 4 sequences on 2 ranks are balanced two by two.
    """
    cells: dict[tuple[int, ...], list[int]] = {}
    for s, key in enumerate(zip(*minis_by_role, strict=True)):
        cells.setdefault(key, []).append(s)
    rank_of = [0] * len(seq_lens)
    loads: list[dict[int, list[float]]] = [{} for _ in minis_by_role]
    for key, members in cells.items():
        costs = [sequence_cost(seq_lens[s]) for s in members]
        so_far = [of_role.setdefault(mini, [0.0] * dp) for of_role, mini in zip(loads, key, strict=True)]
        # Shares come heavy first; with nothing so far, rank d gets share d.
        ranks = sorted(range(dp), key=lambda d: sum(load[d] for load in so_far))
        for d, share in zip(ranks, balanced(costs, dp), strict=True):
            for i in share:
                rank_of[members[i]] = d
            for load in so_far:
                load[d] += sum(costs[i] for i in share)
    return rank_of


def plan_batches(
    seq_lens: Sequence[int],
    mini_of: Sequence[int],
    *,
    dp: int,
    max_tokens: int,
    max_seqs: int | None = None,
    multiple: int = 1,
    packed: bool = True,
    rank_of: Sequence[int] | None = None,
) -> BatchPlan:
    """Split sequences over mini-batches (given), data-parallel ranks and micro-batches (balanced here).

    mini_of: [S] number of each sequence's mini-batch, from 0. multiple: the number of micro-batches of a rank is a
    multiple of this (an interleaved pipeline wants one of its stages). Raises DataError if a sequence is longer than
    max_tokens. Every sequence is in the plan exactly once. packed: False counts every sequence of a micro-batch as
    long as its longest. rank_of: [S] from assign_ranks, for a batch that several roles share; balanced over these
    mini-batches alone if not given.
    """
    longest = max(seq_lens, default=0)
    if longest > max_tokens:
        raise DataError(f"a sequence of {longest} tokens passes actor.max_tokens_per_gpu {max_tokens}; raise that")
    caps = _Caps(max_tokens, max_seqs or len(seq_lens) or 1, packed)
    if rank_of is None:
        rank_of = assign_ranks(seq_lens, [mini_of], dp)
    members: list[list[list[int]]] = [[[] for _ in range(dp)] for _ in range(max(mini_of, default=-1) + 1)]
    for s, (mini, rank) in enumerate(zip(mini_of, rank_of, strict=True)):
        members[mini][rank].append(s)
    return BatchPlan(tuple(_common_count(ranks, seq_lens, multiple, caps) for ranks in members))
