"""A step as a graph: named nodes with declared inputs and outputs, checked when built.

A value has one producer: a node's output or a source (what `run` is given). A node's function is called with
its inputs by name; with one output it returns the value, with several a dict of them, and with none its
result is not looked at.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from megatron_rl.errors import FlowError
from megatron_rl.flow.kinds import fits, kind_text
from megatron_rl.flow.run import run_nodes


@dataclass(frozen=True)
class Node:
    """One piece of a step.

    Example: Node("advantages", advantages, inputs={"scores": list[Score]}, outputs={"adv": Tensor},
    group="controller") calls advantages(scores=...) and stores what it returns as `adv`.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """value name -> stated type (a class, a generic such as list[Prompt], or object for anything)"""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """value name -> stated type"""
    group: str | None = None
    """Where it runs, for people: the worker group's name."""

    def call(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the function and name its outputs. FlowError where it returns other outputs than declared."""
        result = self.fn(**inputs)
        if not self.outputs:
            return {}
        if len(self.outputs) == 1:
            return {next(iter(self.outputs)): result}
        if not isinstance(result, dict) or result.keys() != self.outputs.keys():
            got = sorted(map(str, result)) if isinstance(result, dict) else f"a {type(result).__name__}"
            raise FlowError(
                f"node {self.name!r} declares the outputs {sorted(self.outputs)} but returned {got} "
                "-- return a dict with exactly the declared names"
            )
        return result


@dataclass(frozen=True)
class Constant:
    """A value that stands in for a node; made by `constant`."""

    value: Any


def constant(value: Any) -> Constant:
    """For `Flow.replace`: the node's output is `value`, and nothing upstream runs on its account.

    In place of a node with several outputs, `value` is a dict of them all.
    """
    return Constant(value)


class Flow:
    """Nodes that fit together. An edit checks the whole again, and changes nothing where it finds a fault."""

    def __init__(self, nodes: Sequence[Node], sources: Mapping[str, Any]) -> None:
        """sources: value name -> stated type of what `run` is given. Raises FlowError with every fault."""
        faults = find_faults(nodes, sources) + _unused_sources(nodes, sources)
        _raise_faults(faults)
        self._nodes = {node.name: node for node in nodes}
        self._sources = dict(sources)
        self.last_timings: dict[str, tuple[float, float]] = {}
        """node -> (start, end) of the last run, by time.perf_counter."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def sources(self) -> dict[str, Any]:
        return dict(self._sources)

    def run(self, until: str | None = None, **source_values: Any) -> dict[str, Any]:
        """Run the step and return every node's outputs by value name.

        until: run only what this node needs and the node itself, and return its outputs alone.
        An error in a node stops what has not started, waits for what runs, and is raised with the node's name
        as a note.
        """
        self._check_source_values(source_values)
        names = set(self._nodes) if until is None else self._ancestors(until) | {until}
        nodes = [node for node in self.nodes if node.name in names]
        needed = {value for node in nodes for value in node.inputs if value in self._sources}
        missing = sorted(needed - source_values.keys())
        if missing:
            raise FlowError(f"run needs the source value(s) {missing} -- pass them by name: run({missing[0]}=...)")
        self.last_timings = {}
        values = run_nodes(nodes, {name: source_values[name] for name in needed}, self.last_timings)
        wanted = nodes if until is None else [self._nodes[until]]
        return {value: values[value] for node in wanted for value in node.outputs}

    def replace(self, name: str, new: Node | Constant | Callable[..., Any]) -> None:
        """Put a node, a constant, or a function (with the old inputs and outputs) in a node's place."""
        old = self._node(name)
        if isinstance(new, Constant):
            node = _constant_node(old, new.value)
        elif isinstance(new, Node):
            node = new
        else:
            node = replace(old, fn=new)
        self._rebuild([node if other.name == name else other for other in self.nodes])

    def insert_after(self, name: str, new: Node | Callable[[Any], Any]) -> None:
        """Put a node behind another.

        A plain function maps the single output of node `name`: whatever used the value now gets the
        function's result. So does a Node whose outputs name values of node `name` (it also takes them as
        inputs). The value before the change is then called `<name>.<value>`. A Node with outputs of its own
        is added beside the consumers.
        """
        old = self._node(name)
        if not isinstance(new, Node):
            new = _map_node(old, new, taken=set(self._nodes))
        elif not set(new.inputs) & set(old.outputs):
            raise FlowError(
                f"node {new.name!r} takes none of {sorted(old.outputs)}, the outputs of {name!r} "
                "-- name one of them in its inputs"
            )
        raw = {value: f"{name}.{value}" for value in old.outputs if value in new.outputs}
        pair = [_renamed(old, outputs=raw), _renamed(new, inputs=raw)]
        nodes: list[Node] = []
        for node in self.nodes:
            nodes.extend(pair if node.name == name else [node])
        self._rebuild(nodes)

    def waves(self) -> list[list[Node]]:
        """Nodes by depth: each wave needs only values of the waves before it."""
        return _waves(self.nodes)

    def describe(self) -> str:
        """The graph as a table, in the order in which nodes can run."""
        rows = [
            ("wave", "node", "inputs", "outputs", "group"),
            ("0", "(sources)", "", _values(self._sources), ""),
        ]
        for depth, wave in enumerate(self.waves(), start=1):
            for node in wave:
                inputs = ", ".join(node.inputs)
                rows.append((str(depth), node.name, inputs, _values(node.outputs), node.group or "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append(f"{cells[0]}  {cells[1]}  {cells[2]} -> {cells[3]}  {cells[4]}".rstrip())
        return "\n".join(lines)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart: one box a node, boxes of a group together, values on the arrows."""
        ids = {node.name: f"n{number}" for number, node in enumerate(self.nodes)}
        lines = ["flowchart TD"]
        lines += [f'    s{number}(["{value}"])' for number, value in enumerate(self._sources)]
        for number, group in enumerate(dict.fromkeys(node.group for node in self.nodes)):
            boxes = [f'{ids[node.name]}["{node.name}"]' for node in self.nodes if node.group == group]
            if group is None:
                lines += [f"    {box}" for box in boxes]
            else:
                lines += [
                    f'    subgraph g{number}["{group}"]',
                    *(f"        {box}" for box in boxes),
                    "    end",
                ]
        start = {value: f"s{number}" for number, value in enumerate(self._sources)}
        start |= {value: ids[node.name] for node in self.nodes for value in node.outputs}
        for node in self.nodes:
            for value in node.inputs:
                label = "" if value in self._sources else f'|"{value}"|'
                lines.append(f"    {start[value]} -->{label} {ids[node.name]}")
        return "\n".join(lines)

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            raise FlowError(
                f"the flow has no node {name!r}{_nearest(name, self._nodes)} -- its nodes: {', '.join(self._nodes)}"
            )
        return self._nodes[name]

    def _ancestors(self, name: str) -> set[str]:
        """Names of the nodes whose outputs the node needs, however far up."""
        producers = {value: node.name for node in self.nodes for value in node.outputs}
        found: set[str] = set()
        queue = [self._node(name)]
        while queue:
            for value in queue.pop().inputs:
                producer = producers.get(value)
                if producer is not None and producer not in found:
                    found.add(producer)
                    queue.append(self._nodes[producer])
        return found

    def _check_source_values(self, source_values: Mapping[str, Any]) -> None:
        faults = [
            f"run was given {name!r}, which is no source{_nearest(name, self._sources)} "
            f"-- the sources: {', '.join(self._sources) or 'none'}"
            for name in source_values
            if name not in self._sources
        ]
        _raise_faults(faults)

    def _rebuild(self, nodes: Sequence[Node]) -> None:
        # An edit may leave a source without a user (a constant in place of its reader); only a new Flow
        # refuses that.
        _raise_faults(find_faults(nodes, self._sources))
        self._nodes = {node.name: node for node in nodes}


def find_faults(nodes: Sequence[Node], sources: Mapping[str, Any]) -> list[str]:
    """Every reason why the nodes do not make a flow, as `what -- why -- cure` lines."""
    faults: list[str] = []
    producers: dict[str, Node] = {}
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            faults.append(f"node {node.name!r}: the name is used twice -- give each node a name of its own")
        seen.add(node.name)
        faults += _call_fault(node)
        for value in node.outputs:
            if value in sources:
                faults.append(
                    f"node {node.name!r}, value {value!r}: it is also a source -- rename one, or drop it from sources"
                )
            elif value in producers:
                other = producers[value].name
                faults.append(f"node {node.name!r}, value {value!r}: node {other!r} makes it too -- rename one of them")
            else:
                producers[value] = node
    known = {**sources, **{value: node.outputs[value] for value, node in producers.items()}}
    for node in nodes:
        for value, wanted in node.inputs.items():
            if value not in known:
                faults.append(
                    f"node {node.name!r}, value {value!r}: no node makes it and it is no source"
                    f"{_nearest(value, known)} -- add a node with this output, or name it in sources"
                )
            elif not fits(known[value], wanted):
                origin = f"node {producers[value].name!r}" if value in producers else "the source"
                faults.append(
                    f"node {node.name!r}, value {value!r}: it takes {kind_text(wanted)}, but {origin} makes "
                    f"{kind_text(known[value])} -- make the two stated types agree"
                )
    return faults + _cycles(nodes)


def _call_fault(node: Node) -> list[str]:
    """A fault where the function cannot be called with the node's inputs by name."""
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


def _unused_sources(nodes: Sequence[Node], sources: Mapping[str, Any]) -> list[str]:
    used = {value for node in nodes for value in node.inputs}
    return [f"source {name!r}: no node takes it -- drop it from sources" for name in sources if name not in used]


def _cycles(nodes: Sequence[Node]) -> list[str]:
    """One line for each cycle; a node of each is taken out until none is left."""
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


def _waves(nodes: Sequence[Node]) -> list[list[Node]]:
    made_later = {value for node in nodes for value in node.outputs}
    left, waves = list(nodes), []
    while left:
        wave = [node for node in left if not made_later & set(node.inputs)]
        assert wave, "find_faults lets no cycle through"
        waves.append(wave)
        left = [node for node in left if node not in wave]
        made_later -= {value for node in wave for value in node.outputs}
    return waves


def _constant_node(old: Node, value: Any) -> Node:
    if len(old.outputs) > 1 and (not isinstance(value, dict) or value.keys() != old.outputs.keys()):
        raise FlowError(
            f"node {old.name!r} has the outputs {sorted(old.outputs)}, and the constant does not say each "
            "-- give a dict with exactly these names"
        )
    return Node(old.name, lambda: value, {}, old.outputs, group="constant")


def _map_node(old: Node, fn: Callable[[Any], Any], taken: set[str]) -> Node:
    """A node that maps the single output of `old` to itself with fn."""
    if len(old.outputs) != 1:
        raise FlowError(
            f"node {old.name!r} has the outputs {sorted(old.outputs)}, and a plain function maps exactly one "
            "-- insert a Node that names its inputs and outputs"
        )
    own = getattr(fn, "__name__", type(fn).__name__)
    stem = f"after_{old.name}" if own == "<lambda>" else own
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    return Node(name, lambda **values: fn(*values.values()), old.outputs, old.outputs, old.group)


def _renamed(node: Node, inputs: Mapping[str, str] | None = None, outputs: Mapping[str, str] | None = None) -> Node:
    """The same node with values under other names (old -> new); its function still sees its own names."""
    new_in, new_out = inputs or {}, outputs or {}
    own_in = {new: old for old, new in new_in.items()}

    def fn(**values: Any) -> Any:
        result = node.fn(**{own_in.get(name, name): value for name, value in values.items()})
        if len(node.outputs) > 1 and isinstance(result, dict):
            return {new_out.get(name, name): value for name, value in result.items()}
        return result

    return replace(
        node,
        fn=fn,
        inputs={new_in.get(name, name): kind for name, kind in node.inputs.items()},
        outputs={new_out.get(name, name): kind for name, kind in node.outputs.items()},
    )


def _values(kinds: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {kind_text(kind)}" for name, kind in kinds.items()) or "(nothing)"


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _raise_faults(faults: Sequence[str]) -> None:
    if faults:
        head = f"{len(faults)} fault{'s' if len(faults) != 1 else ''} in the flow:"
        raise FlowError("\n".join([head, *(f"  {fault}" for fault in faults)]))
