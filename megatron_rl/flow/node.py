"""One piece of a step. `node` reads the names and types of its inputs and outputs from the function's annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import TypeAlias, get_type_hints

from megatron_rl.errors import FlowError

StatedType: TypeAlias = object
"""A type as annotations state it: a class, a generic such as list[Prompt], or object for anything."""


@dataclass(frozen=True)
class Node:
    """A function with the names and types of what it takes and makes. Written by hand, or by `node`.

    Example: Node("advantages", advantages, inputs={"scores": list[Score]}, outputs={"adv": Tensor},
    group="controller") calls advantages(scores=...) and stores what it returns as `adv`.
    """

    name: str
    fn: Callable[..., object]
    inputs: Mapping[str, StatedType] = field(default_factory=dict[str, StatedType])
    outputs: Mapping[str, StatedType] = field(default_factory=dict[str, StatedType])
    group: str | None = None
    """Where it runs, for people: the worker group's name."""
    optional: frozenset[str] = frozenset()
    """Inputs that have a default: they may name a value that is `absent` from the flow."""
    makes_fields: bool = False
    """The result is a dataclass whose fields are the outputs, also if there is one field alone."""

    def call(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Run the function and name its outputs.

        With one output the function returns the value, with several a dict or a dataclass of them; without outputs
        its result is not looked at. FlowError if it returns other outputs than declared.
        """
        result = self.fn(**inputs)
        if not self.outputs:
            return {}
        if len(self.outputs) == 1 and not self.makes_fields:
            return {next(iter(self.outputs)): result}
        named = _by_name(result)
        if named is None or named.keys() != self.outputs.keys():
            returned = f"a {type(result).__name__}" if named is None else sorted(named)
            raise FlowError(
                f"node {self.name!r} declares the outputs {sorted(self.outputs)} but returned {returned} "
                "-- return a dict or a dataclass with exactly the declared names"
            )
        return named


@dataclass(frozen=True)
class Absent:
    """A value that no node of this flow makes; made by `absent`."""

    value: str


@dataclass(frozen=True)
class StandIn:
    """A value that stands in for a node; made by `constant`."""

    value: object


def absent(value: str) -> Absent:
    """In a flow's list, where a node is not needed: functions that take `value` get their own default for it."""
    return Absent(value)


def constant(value: object) -> StandIn:
    """For `Flow.replace`: the node's output is `value`, and nothing upstream runs on its account.

    In place of a node with several outputs, `value` is a dict of them all.
    """
    return StandIn(value)


def node(
    fn: Callable[..., object],
    *bound: object,
    name: str | None = None,
    gives: str | None = None,
    group: str | None = None,
) -> Node:
    """A node from a function's own words: parameters are inputs, the return annotation says what it makes.

    A frozen dataclass as result is several outputs, named as its fields are. Any other result is one output, which has
    the function's name, or the name `gives`. bound: values for the first parameters, which then are no inputs. A
    parameter with a default may be absent from the flow.

    Example: def values(models: Models, batch: TrainBatch) -> Tensor: ...
    node(values, models, group="critic") takes `batch` and makes `values`.

    FlowError if a parameter has no name to call it by, or a name is needed and there is none.
    """
    own = name or fn_name(fn)
    inputs, optional, stated = read_signature(fn, own, len(bound))
    result = stated
    call = partial(fn, *bound) if bound else fn
    if result is None or result is type(None):
        return Node(own, call, inputs, {}, group, optional)
    if gives is None and isinstance(result, type) and is_dataclass(result):
        hints = get_type_hints(result)
        outputs: dict[str, StatedType] = {one.name: hints[one.name] for one in fields(result)}
        return Node(own, call, inputs, outputs, group, optional, makes_fields=True)
    single: dict[str, StatedType] = {gives or own: stated}
    return Node(own, call, inputs, single, group, optional)


def read_signature(
    fn: Callable[..., object], name: str, bound: int = 0
) -> tuple[dict[str, StatedType], frozenset[str], StatedType]:
    """(parameter -> stated type, those with a default, type of the result); object where nothing is stated.

    bound: the number of first parameters that are given already. name: for messages.
    """
    hints = _hints(fn)
    parameters = list(inspect.signature(fn).parameters.values())[bound:]
    odd = [one.name for one in parameters if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if odd:
        raise FlowError(f"node {name!r}: the parameter(s) {odd} cannot be passed by name -- name each input")
    inputs = {one.name: hints.get(one.name, object) for one in parameters}
    optional = frozenset(one.name for one in parameters if one.default is not inspect.Parameter.empty)
    return inputs, optional, hints.get("return", object)


def fn_name(fn: Callable[..., object]) -> str:
    """What a function is called; FlowError if it has no name."""
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        return fn.__name__
    raise FlowError(f"{fn!r} has no name of its own -- give the node one: node(fn, name=...)")


def _hints(fn: Callable[..., object]) -> dict[str, StatedType]:
    try:
        return dict(get_type_hints(fn))
    except NameError as error:
        # A name that is imported for the type checker alone.
        raise FlowError(f"{fn_name(fn)}: its annotations cannot be read ({error}) -- import the type") from error


def _by_name(result: object) -> dict[str, object] | None:
    if isinstance(result, dict):
        return {str(name): value for name, value in result.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if is_dataclass(result) and not isinstance(result, type):
        return dict(vars(result))
    return None
