"""Tensors of the tables as files and transformers have them, and back: see models/stacks.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.models.stacks import member_of, members_of


def member_views(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of the tables that a file's tensor is made of, as views of it; itself if it is no stack."""
    names = members_of(name, tuple(tensor.shape))
    views = (part.t() if part.dim() == 2 else part[None] for part in tensor)
    return dict(zip(names, views, strict=True)) if names else {name: tensor}


def stacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Files' tensors of those of the tables, in new memory on their device where they are stacks.

    A layer's experts come one after another, in any order, and are held together until the last of them.
    Raises CheckpointError if an expert is missing, or comes apart from the others.
    """
    layer, parts, done = "", dict[str, dict[int, torch.Tensor]](), set[str]()
    for name, tensor in tensors:
        member = member_of(name)
        of = "" if member is None else member.stack.rpartition(".")[0]
        if of != layer:
            yield from _joined(parts, done)
            layer, parts = of, {}
        if member is None:
            yield name, tensor
        else:
            parts.setdefault(member.stack, {})[member.number] = tensor
    yield from _joined(parts, done)


def _joined(parts: dict[str, dict[int, torch.Tensor]], done: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for stack, members in parts.items():
        if stack in done or sorted(members) != list(range(len(members))):
            raise CheckpointError(f"{stack}: the experts of a layer must come together, got {sorted(members)}")
        done.add(stack)
        first = members[0]
        size = (first.shape[1],) if stack.endswith("_bias") else (first.shape[1], first.shape[0])
        whole = first.new_empty((len(members), *size))
        for name, view in member_views(stack, whole).items():
            member = member_of(name)
            assert member is not None
            view.copy_(members[member.number])
        yield stack, whole
