"""Small collectives that several layers need."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from megatron_rl.types import Metric

T = TypeVar("T")


def keeps_group_order() -> bool:
    """Whether torch makes groups in the order of the ranks given; otherwise a group's ranks ascend."""
    return "sort_ranks" in inspect.signature(torch.distributed.new_group).parameters


def adder(group: torch.distributed.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that adds a tensor up over `group`; its result lies where the tensor does, on the CPU as well if the
    group's backend is NCCL. The tensor may be changed. No gradient passes through it. Every rank must call with
    the same shape.
    """

    def add_up(values: torch.Tensor) -> torch.Tensor:
        if group.size() == 1 or not values.numel():
            return values
        on_device = values.to(_device())
        # A rank without sequences comes too, with zeros: the others wait for it.
        torch.distributed.all_reduce(on_device, group=group)
        return on_device.to(values.device)

    return add_up


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank of the default group: the same answer on all of them."""
    seen = torch.tensor([float(flag)], device=_device())
    # All ranks come, whatever their flag: each must take the branch that the others take.
    torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen.item())


def gathered(found: Sequence[T]) -> list[Sequence[T]]:
    """What each rank of the default group found, in rank order, on all of them. Nothing is sent where none did."""
    world = torch.distributed.get_world_size()
    if not any_rank(bool(found)):
        return [[] for _ in range(world)]
    parts: list[Any] = [None] * world
    # Ranks that found nothing come too; any_rank has told all of them that some rank did.
    torch.distributed.all_gather_object(parts, found)
    return parts


def gathered_by_first(value: T) -> list[T]:
    """The value of each rank of the default group, in rank order, on the first of them; an empty list elsewhere."""
    first = torch.distributed.get_rank() == 0
    parts: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    # All ranks come, whatever they have.
    torch.distributed.gather_object(value, parts)
    return parts or []


def reduce_metrics(metrics: Mapping[str, Metric], group: torch.distributed.ProcessGroup | None) -> dict[str, Metric]:
    """Sums and counts added over `group`, in float64. All ranks must hold the same names."""
    if not metrics:
        return {}
    names = sorted(metrics)
    flat = torch.tensor([[metrics[n].total, metrics[n].count] for n in names], dtype=torch.float64, device=_device())
    # Sorted names and one shape: ranks whose sums had another order would add up other metrics.
    torch.distributed.all_reduce(flat, group=group)
    return {name: Metric(total, count) for name, (total, count) in zip(names, flat.tolist(), strict=True)}
