"""Why nodes do not make a flow: every fault at once, as `what -- why -- cure` lines."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from megatron_rl.errors import FlowError
from megatron_rl.flow.kinds import fits, kind_text
from megatron_rl.flow.node import Node, StatedType


def find_faults(
    nodes: Sequence[Node],
    sources: Mapping[str, StatedType],
    absent: Collection[str] = (),
    readers: Sequence[Node] = (),
) -> list[str]:
    """absent: values that no node makes here, on purpose. readers: functions that read values after the run."""
    faults: list[str] = []
    producers: dict[str, Node] = {}
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            faults.append(f"node {node.name!r}: the name is used twice -- give each node a name of its own")
        seen.add(node.name)
        faults += _call_fault(node)
        for value in node.outputs:
            fault = _output_fault(node, value, sources, absent, producers)
            if fault is None:
                producers[value] = node
            else:
                faults.append(fault)
    known = {**sources, **{value: node.outputs[value] for value, node in producers.items()}}
    for node in [*nodes, *readers]:
        faults += _input_faults(node, known, producers, absent)
    for reader in readers:
        faults += _call_fault(reader)
    return faults + _cycles(nodes)


def unused_sources(nodes: Sequence[Node], sources: Mapping[str, StatedType]) -> list[str]:
    """A line for each source that no node takes."""
    used = {value for node in nodes for value in node.inputs}
    return [f"source {name!r}: no node takes it -- drop it from sources" for name in sources if name not in used]


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'scores'?)", or "" if nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def raise_faults(faults: Sequence[str]) -> None:
    """FlowError with all faults, if there are any."""
    if faults:
        head = f"{len(faults)} fault{'s' if len(faults) != 1 else ''} in the flow:"
        raise FlowError("\n".join([head, *(f"  {fault}" for fault in faults)]))


def _output_fault(
    node: Node,
    value: str,
    sources: Mapping[str, StatedType],
    absent: Collection[str],
    producers: Mapping[str, Node],
) -> str | None:
    where = f"node {node.name!r}, value {value!r}"
    if value in sources:
        return f"{where}: it is also a source -- rename one, or drop it from sources"
    if value in absent:
        return f"{where}: it is also said to be absent -- leave out one of the two"
    if value in producers:
        return f"{where}: node {producers[value].name!r} makes it too -- rename one of them"
    return None


def _input_faults(
    node: Node, known: Mapping[str, StatedType], producers: Mapping[str, Node], absent: Collection[str]
) -> list[str]:
    faults: list[str] = []
    for value, wanted in node.inputs.items():
        where = f"node {node.name!r}, value {value!r}"
        if value in absent:
            if value not in node.optional:
                faults.append(f"{where}: it is absent from this flow -- give the parameter a default")
        elif value not in known:
            faults.append(
                f"{where}: no node makes it and it is no source{nearest(value, known)} "
                "-- add a node with this output, or name it in sources"
            )
        elif not fits(known[value], wanted):
            origin = f"node {producers[value].name!r}" if value in producers else "the source"
            faults.append(
                f"{where}: it takes {kind_text(wanted)}, but {origin} makes {kind_text(known[value])} "
                "-- make the two stated types agree"
            )
    return faults


def _call_fault(node: Node) -> list[str]:
    """A fault if the function cannot be called with the node's inputs by name."""
    if not callable(node.fn):
        return [f"node {node.name!r}: fn is {node.fn!r}, which cannot be called -- pass a function"]
    try:
        signature = inspect.signature(node.fn)
    except ValueError:  # some built-ins have no signature to look at
        return []
    try:
        signature.bind(**dict.fromkeys(node.inputs))
    except TypeError as error:
        return [
            f"node {node.name!r}: fn{signature} cannot take inputs {sorted(node.inputs)}: {error} -- match the names"
        ]
    return []


def _cycles(nodes: Sequence[Node]) -> list[str]:
    """One line for each cycle; a node of each is taken out until none remains."""
    producers = {value: node.name for node in nodes for value in node.outputs}
    needs = {node.name: {producers[value]: value for value in node.inputs if value in producers} for node in nodes}
    faults: list[str] = []
    while True:
        try:
            TopologicalSorter({name: list(of) for name, of in needs.items()}).prepare()
            return faults
        except CycleError as error:
            path: list[str] = error.args[1]
            # graphlib lists each node before the one that needs it.
            steps = [f"{user!r} needs {needs[user][maker]!r} of {maker!r}" for maker, user in pairwise(path)]
            faults.append(f"node {path[0]!r}: a cycle: {', '.join(steps)} -- break it, for instance with a source")
            del needs[path[0]]
            for of in needs.values():
                of.pop(path[0], None)
