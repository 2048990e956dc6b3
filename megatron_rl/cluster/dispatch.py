"""Which rank of a worker group gets what of a call, and whose results come back. Pure: no process is needed.

The caller says it (cluster/worker_group.py): every rank alike, or an entry for each data-parallel replica or engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from megatron_rl.errors import ClusterError

Call = tuple[tuple[object, ...], dict[str, object]]
"""(positional arguments, keyword arguments) of one rank."""


@dataclass(frozen=True)
class Replicas:
    """How ranks are dealt out to the replicas of a model or to engines. Entry r of each tuple belongs to rank r.

    Example, two engines of two ranks each: Replicas((0, 0, 1, 1), (True, False, True, False))
    """

    of_rank: tuple[int, ...]
    """The number of the replica that the rank is a part of."""
    is_head: tuple[bool, ...]
    """One True for each replica: the rank that answers for it."""

    def __post_init__(self) -> None:
        assert len(self.of_rank) == len(self.is_head), (self.of_rank, self.is_head)
        headed = sorted(replica for replica, head in zip(self.of_rank, self.is_head, strict=True) if head)
        assert headed == sorted(set(self.of_rank)) == list(range(len(headed))), (self.of_rank, self.is_head)

    @property
    def count(self) -> int:
        return sum(self.is_head)

    @property
    def heads(self) -> tuple[int, ...]:
        """The head rank of each replica, in the order of the replicas."""
        ranks = (rank for rank, head in enumerate(self.is_head) if head)
        return tuple(sorted(ranks, key=lambda rank: self.of_rank[rank]))


@dataclass(frozen=True)
class RankGrid:
    """What dispatch must know of a layout."""

    world: int
    dp: Replicas
    """Data-parallel replicas. The head of each has tp = cp = 0 and the last pipeline stage: it holds the results."""
    engines: Replicas | None = None
    """Rollout engines; None if the ranks have none."""
    names: tuple[str, ...] = ()
    """What each rank is, such as "tp 1 pp 0 dp 3", for the table of ranks; empty if no table is wanted."""

    def __post_init__(self) -> None:
        for replicas in (self.dp, *([] if self.engines is None else [self.engines])):
            assert len(replicas.of_rank) == self.world, (replicas, self.world)

    @property
    def num_dp(self) -> int:
        return self.dp.count

    @property
    def num_engines(self) -> int:
        return 0 if self.engines is None else self.engines.count

    @staticmethod
    def flat(world: int) -> RankGrid:
        """Every rank is a data-parallel replica of its own (tp = pp = cp = 1); no engines."""
        return RankGrid(world, Replicas(tuple(range(world)), (True,) * world))


def call_for_all(args: Sequence[object], kwargs: Mapping[str, object], grid: RankGrid) -> list[Call]:
    """The same arguments for every rank: one tuple object, so that a backend can ship it once."""
    return [(tuple(args), dict(kwargs))] * grid.world


def call_by_replica(
    entries: Sequence[object], args: Sequence[object], kwargs: Mapping[str, object], replicas: Replicas, what: str
) -> list[Call]:
    """Entry i as the first argument of all ranks of replica i, the other arguments alike on all.

    what: the name of a replica in messages. Ranks of a replica share one tuple object, so that a backend can ship it
    once. Raises ClusterError if there is not one entry a replica.
    """
    if not isinstance(entries, list | tuple) or len(entries) != replicas.count:
        given = f"{len(entries)} entries" if isinstance(entries, list | tuple) else f"a {type(entries).__name__}"
        raise ClusterError(
            f"the call takes a list with one entry per {what} ({replicas.count}), but got {given} "
            f"-- pass exactly {replicas.count}"
        )
    calls: list[Call] = [((entry, *args), dict(kwargs)) for entry in entries]
    return [calls[replica] for replica in replicas.of_rank]


def method_path(worker_cls: type, method: Callable[..., object]) -> str:
    """How a rank reaches `method` from its worker: "step" if the worker's class defines it, "train.step" if that is the
    class of its attribute `train`, as annotated in the worker's class, and so on inwards.

    Raises ClusterError if no part of the worker has the method.
    """
    seen: list[type] = []
    ways: list[tuple[str, type]] = [("", worker_cls)]
    for way, kind in ways:
        if _defines(kind, method):
            return f"{way}{method.__name__}"
        seen.append(kind)
        parts = {name: part for name, part in get_type_hints(kind).items() if isinstance(part, type)}
        ways += [(f"{way}{name}.", part) for name, part in parts.items() if part not in seen]
    shown = ", ".join(kind.__name__ for kind in seen)
    raise ClusterError(f"{method.__qualname__} is no method of the group's workers, which are made of: {shown}")


def _defines(kind: type, method: Callable[..., object]) -> bool:
    return any(vars(base).get(method.__name__) is method for base in kind.__mro__)
