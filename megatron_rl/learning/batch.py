"""The batch of a step as the controller knows it: facts of each sequence. Tokens and columns lie on the ranks."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.run import RunConfig, TrainingConfig
from megatron_rl.data.batching import BatchPlan, assign_ranks, plan_batches
from megatron_rl.types import Column


class OnRanks(NamedTuple):
    """A column of the step's batch, which lies on the ranks: nodes pass its name on. Models.fetch brings it here."""

    column: Column


@dataclass(frozen=True, eq=False)
class Batch:
    """S sequences of a step. Everything here is per sequence: what it costs does not depend on lengths."""

    seq_lens: tuple[int, ...]
    """[S] tokens of prompt and response"""
    response_lens: Tensor
    """[S] int64: trained tokens"""
    numbers: tuple[tuple[int, ...], ...]
    """[dp] the sequences of each data-parallel rank, in the order in which the rank holds them"""
    group_ids: Tensor
    """[S] int64: sequences of one prompt have one number"""
    was_cut: Tensor
    """[S] bool: responses that ended at the length limit"""
    names: Callable[[], Sequence[str]]
    """[S] what each sequence is called in messages."""

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)

    def split(self, values: Tensor) -> list[Tensor]:
        """[S] values -> those of each data-parallel rank, in its order."""
        return [values[list(of_rank)] for of_rank in self.numbers]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        whole = torch.zeros(self.num_sequences, dtype=parts[0].dtype)
        for of_rank, part in zip(self.numbers, parts, strict=True):
            whole[list(of_rank)] = part
        return whole

    def split_tokens(self, values: Tensor) -> list[Tensor]:
        """[T] values, sequence after sequence -> those of each data-parallel rank."""
        pieces = values.split(list(self.seq_lens))
        return [torch.cat([values[:0], *(pieces[s] for s in of_rank)]) for of_rank in self.numbers]

    def join_tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split_tokens`."""
        pieces = [torch.zeros(0)] * self.num_sequences
        for of_rank, part in zip(self.numbers, parts, strict=True):
            lens = [self.seq_lens[s] for s in of_rank]
            for s, piece in zip(of_rank, part.split(lens), strict=True):
                pieces[s] = piece
        return torch.cat([torch.zeros(0), *pieces])


def plan_roles(
    cfg: RunConfig,
    seq_lens: Sequence[int],
    roles: Sequence[tuple[TrainingConfig, Sequence[int]]],
    together: int = 1,
) -> tuple[list[BatchPlan], tuple[tuple[int, ...], ...]]:
    """The plan of each role, and the sequences of each data-parallel rank, the same for all roles.

    roles: how each trains, and the mini-batch of each sequence. together: so many sequences, one after the other, stay
    in one micro-batch and next to each other (the two answers of a pair); a role's micro_batch_size is at least that.
    """
    if together > 1:
        return _plan_units(cfg, seq_lens, roles, together)
    # Context parallelism pads each sequence to whole chunks.
    cp, dp = cfg.actor.cp, cfg.dp_size
    unit = 2 * cp if cp > 1 else 1
    lens = [-(-length // unit) * unit for length in seq_lens]
    rank_of = assign_ranks(lens, [mini_of for _, mini_of in roles], dp)
    plans = [
        plan_batches(
            lens,
            mini_of,
            dp=dp,
            max_tokens=training.max_tokens_per_gpu * cp,
            max_seqs=training.micro_batch_size,
            multiple=cfg.actor.pp if cfg.actor.vpp > 1 else 1,
            packed=cfg.actor.packing,
            rank_of=rank_of,
        )
        for training, mini_of in roles
    ]
    numbers: list[list[int]] = [[] for _ in range(dp)]
    for s, rank in enumerate(rank_of):
        numbers[rank].append(s)
    return plans, tuple(map(tuple, numbers))


def _plan_units(
    cfg: RunConfig, seq_lens: Sequence[int], roles: Sequence[tuple[TrainingConfig, Sequence[int]]], size: int
) -> tuple[list[BatchPlan], tuple[tuple[int, ...], ...]]:
    """As plan_roles, of units of `size` sequences: planned as one long sequence each, then taken apart."""
    cp = cfg.actor.cp
    chunk = 2 * cp if cp > 1 else 1
    units = [
        [-(-length // chunk) * chunk for length in seq_lens[at : at + size]] for at in range(0, len(seq_lens), size)
    ]
    # Without packing each sequence is padded to the longest of its micro-batch.
    lens = [sum(unit) if cfg.actor.packing else size * max(unit) for unit in units]
    of_units = [
        (replace(one, micro_batch_size=one.micro_batch_size and one.micro_batch_size // size), mini_of[::size])
        for one, mini_of in roles
    ]
    plans, numbers = plan_roles(cfg, lens, of_units)

    def whole(planned: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(unit * size + i for unit in planned for i in range(size))

    taken_apart = [
        BatchPlan(tuple(tuple(tuple(map(whole, micros)) for micros in ranks) for ranks in plan.minis)) for plan in plans
    ]
    return taken_apart, tuple(map(whole, numbers))
