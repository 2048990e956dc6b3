"""From rollouts to balanced micro-batches. Plans are pure integers; executing one is `TrainBatch.select`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.errors import DataError
from megatron_rl.types import RolloutGroup, TrainBatch

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

    def passes(self) -> list[list[tuple[int, ...]]]:
        """[dp][j]: every micro-batch of each rank, mini-batch after mini-batch: the shapes of a forward-only pass."""
        return [[micro for rank in ranks for micro in rank] for ranks in zip(*self.minis, strict=True)]

    def keep(self, kept: torch.Tensor) -> BatchPlan:
        """The plan without the sequences where kept [S] is False; every micro-batch stays, though maybe empty."""
        flags = kept.tolist()

        def thin(micro: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(s for s in micro if flags[s])

        return BatchPlan(tuple(tuple(tuple(thin(m) for m in rank) for rank in mini) for mini in self.minis))


def select_micro_batches(batch: TrainBatch, ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[TrainBatch]]:
    """[dp][j] sequence numbers -> [dp][j] batches."""
    return [[batch.select(micro) for micro in micros] for micros in ranks]


def collect_column(
    batch: TrainBatch, ranks: Sequence[Sequence[Sequence[int]]], parts: Sequence[Sequence[torch.Tensor]]
) -> torch.Tensor:
    """The inverse of select_micro_batches for one column: [dp][j] pieces -> [T], 0 for sequences in no micro-batch."""
    starts = [0]
    for length in batch.seq_lens:
        starts.append(starts[-1] + length)
    column = torch.zeros(batch.num_tokens, dtype=torch.float32)
    for micros, pieces in zip(ranks, parts, strict=True):
        for micro, piece in zip(micros, pieces, strict=True):
            lengths = [batch.seq_lens[s] for s in micro]
            for s, values in zip(micro, piece.split(lengths), strict=True):
                column[starts[s] : starts[s + 1]] = values
    return column


def from_rollouts(groups: Sequence[RolloutGroup]) -> tuple[TrainBatch, torch.Tensor]:
    """Rollouts end to end, and the group [S] of each sequence. Column rollout_logprobs holds the engine's
    log-probabilities.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    seq_lens: list[int] = []
    group_ids: list[int] = []
    for number, group in enumerate(groups):
        prompt = group.prompt.token_ids
        for rollout in group.rollouts:
            tokens.extend(prompt)
            tokens.extend(rollout.token_ids)
            mask.extend([False] * len(prompt) + [True] * len(rollout.token_ids))
            logprobs.extend([0.0] * len(prompt))
            logprobs.extend(rollout.logprobs)
            seq_lens.append(len(prompt) + len(rollout.token_ids))
            group_ids.append(number)
    batch = TrainBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        seq_lens=tuple(seq_lens),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        columns={"rollout_logprobs": torch.tensor(logprobs, dtype=torch.float32)},
    )
    return batch, torch.tensor(group_ids, dtype=torch.int64)


def sequence_cost(length: int) -> float:
    """Relative compute of a sequence: linear layers, and attention's quadratic term (about equal at 24,576 tokens for
    hidden sizes in the thousands)."""
    return length * (1.0 + length / 24576.0)


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices in num_parts lists of near-equal total cost: the largest differencing method (Karmarkar and Karp
    1982).
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    # A state is (spread, tie-breaker, parts), a part (cost, members), parts from heavy to light.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, cost in enumerate(costs):
        parts: list[tuple[float, list[int]]] = [(cost, [i])] + [(0.0, []) for _ in range(num_parts - 1)]
        heap.append((-cost, i, parts))
    if not heap:
        return [[] for _ in range(num_parts)]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [
            (a_cost + b_cost, a_items + b_items)
            for (a_cost, a_items), (b_cost, b_items) in zip(left, reversed(right), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(items) for _, items in heap[0][2]]


def _micro_batches(
    members: Sequence[int], seq_lens: Sequence[int], at_least: int, max_tokens: int, max_seqs: int
) -> MicroBatches:
    """Balanced micro-batches of `members`, at least `at_least` of them, each within both caps."""
    tokens = sum(seq_lens[s] for s in members)
    count = max(at_least, -(-tokens // max_tokens), -(-len(members) // max_seqs))
    while True:
        parts = karmarkar_karp([sequence_cost(seq_lens[s]) for s in members], count)
        fits = all(sum(seq_lens[members[i]] for i in part) <= max_tokens and len(part) <= max_seqs for part in parts)
        if fits:
            return tuple(tuple(members[i] for i in part) for part in parts)
        count += 1


def plan_batches(
    seq_lens: Sequence[int],
    mini_of: Sequence[int],
    *,
    dp: int,
    max_tokens: int,
    max_seqs: int | None = None,
) -> BatchPlan:
    """Split sequences over mini-batches (given), data-parallel ranks and micro-batches (balanced here).

    mini_of: [S] number of each sequence's mini-batch, from 0. Raises DataError where a sequence is longer than
    max_tokens. Every sequence is in the plan exactly once.
    """
    longest = max(seq_lens, default=0)
    if longest > max_tokens:
        raise DataError(f"a sequence of {longest} tokens passes actor.max_tokens_per_gpu {max_tokens}; raise that")
    cap = max_seqs or len(seq_lens) or 1
    minis = []
    for mini in range(max(mini_of, default=-1) + 1):
        members = [s for s, m in enumerate(mini_of) if m == mini]
        parts = karmarkar_karp([sequence_cost(seq_lens[s]) for s in members], dp)
        ranks = [[members[i] for i in part] for part in parts]
        count = 1
        while True:
            plans = [_micro_batches(rank, seq_lens, count, max_tokens, cap) for rank in ranks]
            count = max(len(plan) for plan in plans)
            if all(len(plan) == count for plan in plans):
                break
        minis.append(tuple(plans))
    return BatchPlan(tuple(minis))
