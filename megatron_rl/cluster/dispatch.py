"""How a call on a worker group reaches its ranks, declared on the worker's methods. Pure: no process is needed.

class PolicyWorker:
    @dispatch(split=Split.SPLIT_DP)
    def logprobs(self, batch): ...

group.logprobs([batch_of_dp_0, batch_of_dp_1])  ->  [result of dp 0, result of dp 1]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from megatron_rl.errors import ClusterError

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""(positional arguments, keyword arguments) of one rank."""


class Split(Enum):
    """Who gets which arguments."""

    ALL = "all"
    """Every rank, the same arguments."""
    SPLIT_DP = "dp"
    """The first argument is a list with one entry per data-parallel rank; all ranks of d get entry d."""
    SPLIT_ENGINE = "engine"
    """The first argument is a list with one entry per rollout engine; all ranks of engine e get entry e."""
    RANK0 = "rank0"
    """Rank 0 alone."""


class Collect(Enum):
    """Whose results come back."""

    ALL = "all"
    """A list of every rank's."""
    DP = "dp"
    """A list with one per data-parallel rank, from its head: tp = cp = 0, last pipeline stage."""
    ENGINE = "engine"
    """A list with one per rollout engine, from its first rank."""
    RANK0 = "rank0"
    """Rank 0's, alone."""


_OWN_COLLECT = {
    Split.ALL: Collect.ALL,
    Split.SPLIT_DP: Collect.DP,
    Split.SPLIT_ENGINE: Collect.ENGINE,
    Split.RANK0: Collect.RANK0,
}


@dataclass(frozen=True)
class Dispatch:
    """The mode of one method."""

    split: Split
    collect: Collect


@dataclass(frozen=True)
class RankGrid:
    """What dispatch must know of a layout. Entry r of each tuple belongs to rank r.

    Example, dp=2 and tp=2, engines of 2 ranks: RankGrid(world=4, dp_of_rank=(0, 0, 1, 1), is_dp_head=(True, False,
    True, False), engine_of_rank=(0, 0, 1, 1), is_engine_head=(True, False, True, False))
    """

    world: int
    dp_of_rank: tuple[int, ...]
    is_dp_head: tuple[bool, ...]
    """One True for each data-parallel rank: tp = cp = 0, last pipeline stage."""
    engine_of_rank: tuple[int, ...]
    is_engine_head: tuple[bool, ...]
    """One True for each engine."""

    def __post_init__(self) -> None:
        for parts, heads in ((self.dp_of_rank, self.is_dp_head), (self.engine_of_rank, self.is_engine_head)):
            assert len(parts) == len(heads) == self.world, (parts, heads, self.world)
            headed = sorted(part for part, head in zip(parts, heads, strict=True) if head)
            assert headed == sorted(set(parts)) == list(range(len(headed))), (parts, heads)

    @property
    def num_dp(self) -> int:
        return sum(self.is_dp_head)

    @property
    def num_engines(self) -> int:
        return sum(self.is_engine_head)

    @staticmethod
    def flat(world: int) -> RankGrid:
        """Every rank a data-parallel rank and an engine of its own (tp = pp = cp = 1)."""
        ranks, heads = tuple(range(world)), (True,) * world
        return RankGrid(world, ranks, heads, ranks, heads)


def dispatch(split: Split = Split.ALL, collect: Collect | None = None) -> Callable[[MethodT], MethodT]:
    """Declare how a worker's method is called through its group; collect follows split when not given.

    With a method whose result is the same on every rank, collect=Collect.RANK0 brings it back once.
    """

    def mark(method: MethodT) -> MethodT:
        method.__dispatch__ = Dispatch(split, collect or _OWN_COLLECT[split])  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_cls: type, method: str) -> Dispatch:
    """The declared mode of a method. ClusterError where the method is not declared, AttributeError without it."""
    found = getattr(worker_cls, method, None)
    if found is None:
        known = sorted(name for name in dir(worker_cls) if hasattr(getattr(worker_cls, name), "__dispatch__"))
        raise AttributeError(f"{worker_cls.__name__} has no method {method!r}; declared: {', '.join(known) or 'none'}")
    mode = getattr(found, "__dispatch__", None)
    if mode is None:
        raise ClusterError(
            f"{worker_cls.__name__}.{method} is not declared for calls through a worker group "
            "-- put @dispatch(split=...) above it"
        )
    return mode


def scatter(mode: Dispatch, args: Sequence[Any], kwargs: Mapping[str, Any], grid: RankGrid) -> list[Call | None]:
    """Each rank's (args, kwargs), or None for a rank that is not called.

    Ranks with the same arguments share one tuple object, so that a backend can ship it once.
    ClusterError where a split's first argument is no list with one entry per part.
    """
    if mode.split in (Split.ALL, Split.RANK0):
        call: Call = (tuple(args), dict(kwargs))
        return [call if mode.split is Split.ALL or rank == 0 else None for rank in range(grid.world)]
    by_dp = mode.split is Split.SPLIT_DP
    count, what = (grid.num_dp, "data-parallel rank") if by_dp else (grid.num_engines, "rollout engine")
    if not args or not isinstance(args[0], list | tuple) or len(args[0]) != count:
        got = f"{len(args[0])} entries" if args and isinstance(args[0], list | tuple) else "no list"
        raise ClusterError(
            f"a split call's first argument is a list with one entry per {what} ({count}), but got {got} "
            f"-- pass exactly {count}"
        )
    calls: list[Call] = [((entry, *args[1:]), dict(kwargs)) for entry in args[0]]
    return [calls[part] for part in (grid.dp_of_rank if by_dp else grid.engine_of_rank)]


def collected_ranks(mode: Dispatch, grid: RankGrid) -> tuple[int, ...]:
    """Ranks whose results `gather` looks at, in the order of its list."""
    ranks = range(grid.world)
    if mode.collect is Collect.RANK0 or mode.split is Split.RANK0:
        return (0,)
    if mode.collect is Collect.ALL:
        return tuple(ranks)
    by_dp = mode.collect is Collect.DP
    heads, parts = (grid.is_dp_head, grid.dp_of_rank) if by_dp else (grid.is_engine_head, grid.engine_of_rank)
    return tuple(sorted((rank for rank in ranks if heads[rank]), key=lambda rank: parts[rank]))


def gather(mode: Dispatch, results: Sequence[Any], grid: RankGrid) -> Any:
    """What the caller gets from per-rank results: one value for Collect.RANK0, else a list."""
    assert len(results) == grid.world, (len(results), grid.world)
    if mode.collect is Collect.RANK0:
        return results[0]
    return [results[rank] for rank in collected_ranks(mode, grid)]
