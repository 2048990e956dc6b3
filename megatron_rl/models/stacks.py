"""Experts whose projections a checkpoint holds as one tensor for all of a layer's experts, as gpt-oss does. Pure.

In tables each expert's projection is a matrix [out, in] of its own, and each bias a row [1, out], under a name with the
expert's number. Files, transformers and vLLM have stacks [experts, in, out] and [experts, out]: turned round, and under
the name without the number. Whatever reads or writes these goes through the functions here.

Example: `model.layers.0.mlp.experts.5.gate_up_proj` [2 f, h] is index 5 of `model.layers.0.mlp.experts.gate_up_proj`
[experts, h, 2 f], turned round.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_PROJECTION = r"(?:gate_up|down)_proj(?:_bias)?"
_MEMBER = re.compile(rf"(.+\.experts)\.(\d+)\.({_PROJECTION})")
_STACK = re.compile(rf"(.+\.experts)\.({_PROJECTION})")

Sizes = Mapping[str, tuple[int, ...]]
"""Tensor -> its shape"""


@dataclass(frozen=True)
class Member:
    """Which part of a stack a tensor of the tables is."""

    stack: str
    number: int


def member_of(name: str) -> Member | None:
    """The stack that a tensor of the tables is in; None if files have it as it is."""
    match = _MEMBER.fullmatch(name)
    return Member(f"{match[1]}.{match[3]}", int(match[2])) if match else None


def member_shape(stack: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the tables of each member of a stack [experts, in, out] or [experts, out]."""
    return (stack[-1], stack[1]) if len(stack) == 3 else (1, stack[-1])


def members_of(stack: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors of the tables that a file's tensor stands for, with their shapes; empty if it is no stack."""
    match = _STACK.fullmatch(stack)
    if match is None or len(shape) not in (2, 3):
        return {}
    return {f"{match[1]}.{number}.{match[2]}": member_shape(shape) for number in range(shape[0])}


def stacked_shapes(shapes: Sizes) -> dict[str, tuple[int, ...]]:
    """The tensors of files, from those of the tables, in their order."""
    experts: dict[str, int] = {}
    stacked: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        member = member_of(name)
        if member is None:
            stacked[name] = shape
            continue
        experts[member.stack] = experts.get(member.stack, 0) + 1
        rows, cols = shape
        is_bias = member.stack.endswith("_bias")
        stacked[member.stack] = (experts[member.stack], cols) if is_bias else (experts[member.stack], cols, rows)
    return stacked


def unstacked_shapes(shapes: Sizes) -> dict[str, tuple[int, ...]]:
    """The tensors of the tables, from those of files."""
    return {
        member: size
        for name, shape in shapes.items()
        for member, size in (members_of(name, shape) or {name: shape}).items()
    }


def by_stack(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """(tensor of files, the tables' tensors that it is made of in order), in the order of the first ones."""
    groups: dict[str, list[str]] = {}
    for name in names:
        member = member_of(name)
        groups.setdefault(name if member is None else member.stack, []).append(name)
    for stack, members in groups.items():
        yield stack, sorted(members, key=_number)


def _number(name: str) -> int:
    member = member_of(name)
    return 0 if member is None else member.number
