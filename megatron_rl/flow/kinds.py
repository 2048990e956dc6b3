"""Stated types of a flow's values: whether what one node makes fits what another takes."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

from megatron_rl.flow.node import StatedType


def fits(made: StatedType, taken: StatedType) -> bool:
    """Whether a value of stated type `made` may go where `taken` is stated.

    object and Any go with everything. Classes go by issubclass (and int where float is taken), unions member
    by member, generics by origin and then argument by argument; a bare generic goes with any arguments. Other
    things must be equal.
    """
    if made == taken or object in (made, taken) or Any in (made, taken):
        return True
    if _is_union(made):
        return all(fits(member, taken) for member in get_args(made))
    if _is_union(taken):
        return any(fits(made, member) for member in get_args(taken))
    made_class, taken_class = _class_of(made), _class_of(taken)
    if made_class is None or taken_class is None:
        return False
    if not (issubclass(made_class, taken_class) or (made_class is int and taken_class is float)):
        return False
    return _args_fit(made_class, get_args(made), get_args(taken))


def kind_text(kind: StatedType) -> str:
    """A stated type as a person writes it: Prompt, list[Prompt], int | None."""
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    if _is_union(kind):
        return " | ".join("None" if member is type(None) else kind_text(member) for member in get_args(kind))
    if kind is Ellipsis:
        return "..."
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(origin, type) and args:
        return f"{origin.__name__}[{', '.join(kind_text(arg) for arg in args)}]"
    return str(kind).removeprefix("typing.")


def _is_union(kind: StatedType) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _class_of(kind: StatedType) -> type | None:
    if kind is None:
        return type(None)
    origin = get_origin(kind)
    if isinstance(origin, type):
        return origin
    return kind if isinstance(kind, type) else None


def _args_fit(made_class: type, made: tuple[StatedType, ...], taken: tuple[StatedType, ...]) -> bool:
    if not made or not taken:
        return True
    if made_class is tuple and (len(taken) == 1 or taken[-1] is Ellipsis):
        # tuple[int, str] read as a sequence of its members; tuple[int, ...] has one member type.
        return all(fits(member, taken[0]) for member in made if member is not Ellipsis)
    return len(made) == len(taken) and all(map(fits, made, taken))
