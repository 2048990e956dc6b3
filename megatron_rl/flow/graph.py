"""A step as a graph: named nodes with declared inputs and outputs, checked when built.

A value has one producer: a node's output or a source (what `run` is given). Functions that only read values once a
step is over (metrics) are checked in the same way: a name that no node makes is found before anything runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from megatron_rl.errors import FlowError
from megatron_rl.flow.checks import find_faults, nearest, raise_faults, unused_sources
from megatron_rl.flow.kinds import kind_text
from megatron_rl.flow.node import Absent, Node, StandIn, StatedType, fn_name, read_signature
from megatron_rl.flow.run import During, PartialRun, Timings, run_nodes, untold


class Flow:
    """Nodes that fit together. An edit checks the whole again, and changes nothing where it finds a fault."""

    def __init__(self, nodes: Sequence[Node | Absent], sources: Mapping[str, StatedType]) -> None:
        """sources: value name -> stated type of what `run` is given. Raises FlowError with every fault."""
        self._absent = tuple(one.value for one in nodes if isinstance(one, Absent))
        self._sources = dict(sources)
        self._readers: tuple[Node, ...] = ()
        own = [one for one in nodes if isinstance(one, Node)]
        raise_faults(find_faults(own, self._sources, self._absent) + unused_sources(own, self._sources))
        self._nodes = self._wired(own)
        self.during: During = untold
        """Entered with the name of each node that runs, for whoever tells what a step is at."""
        self.last_timings: Timings = {}
        """node -> (start, end) of the last run, by time.perf_counter."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def sources(self) -> dict[str, StatedType]:
        return dict(self._sources)

    def makes(self, value: str) -> bool:
        """Whether a node makes this value."""
        return any(value in node.outputs for node in self.nodes)

    def run(self, until: str | None = None, **source_values: object) -> dict[str, object]:
        """Run the step and return, by name, every value that was made.

        until: run only what this node needs and the node itself, and return its outputs alone; a value's name stands
        for the node that makes it. An error in a node stops what has not started and waits for what runs; a note of it
        has the node's name.
        """
        end = self.advance(self.begin(**source_values), until=None if until is None else [until])
        self.last_timings = end.timings
        returned = self.nodes if until is None else [self._node(until)]
        return {value: end.values[value] for node in returned for value in node.outputs}

    def begin(self, **source_values: object) -> PartialRun:
        """A step that has its source values and nothing else yet, for `advance`."""
        faults = [
            f"run was given {name!r}, which is no source{nearest(name, self._sources)} "
            f"-- the sources: {', '.join(self._sources) or 'none'}"
            for name in source_values
            if name not in self._sources
        ]
        raise_faults(faults)
        return PartialRun(source_values)

    def advance(
        self, so_far: PartialRun, *, until: Iterable[str] | None = None, before: str | None = None
    ) -> PartialRun:
        """Run nodes of a step that have not run yet; with the values so far, those that they make.

        until: these nodes, and what they need. before: leave out this node and all that needs it. A value's name
        stands for the node that makes it.
        """
        names = set(self._nodes) if until is None else self._ancestors(until)
        names -= so_far.done | (set[str]() if before is None else self._descendants(before))
        nodes = [node for node in self.nodes if node.name in names]
        needed = {value for node in nodes for value in node.inputs}
        missing = sorted(value for value in needed if value in self._sources and value not in so_far.values)
        if missing:
            raise FlowError(f"run needs the source value(s) {missing} -- pass them by name: run({missing[0]}=...)")
        timings: Timings = {}
        values = run_nodes(nodes, so_far.values, timings, self.during)
        return PartialRun(values, so_far.done | names, so_far.timings | timings)

    def watch(self, readers: Sequence[Node]) -> None:
        """Functions that read values once a step is over; checked now and at every edit. FlowError with every fault."""
        raise_faults(find_faults(self.nodes, self._sources, self._absent, readers))
        self._readers = tuple(readers)

    def read(self, values: Mapping[str, object]) -> list[object]:
        """Call the readers, in their order, on a step's values (sources included); what each returned."""
        results: list[object] = []
        for reader in self._readers:
            inputs = [name for name in reader.inputs if name not in self._absent]
            results.append(reader.fn(**{name: values[name] for name in inputs}))
        return results

    def replace(self, name: str, new: Node | StandIn | Callable[..., object]) -> None:
        """Put a node, a constant, or a function in a node's place.

        A function has the old outputs, and takes any values of the flow by its parameters' names.
        """
        old = self._node(name)
        if isinstance(new, StandIn):
            node = _constant_node(old, new.value)
        elif isinstance(new, Node):
            node = new
        else:
            node = _function_node(old, new)
        self._rebuild([node if other.name == old.name else other for other in self.nodes])

    def insert_after(self, name: str, new: Node | Callable[..., object]) -> None:
        """Put a node behind another.

        A plain function maps the single output of node `name`: whatever used the value now gets the function's result.
        So does a Node whose outputs name values of node `name` (it also takes them as inputs). The value before the
        change is then called `<name>.<value>`. A Node with outputs of its own is added beside the consumers.
        """
        old = self._node(name)
        if not isinstance(new, Node):
            new = _map_node(old, new, taken=set(self._nodes))
        elif not set(new.inputs) & set(old.outputs):
            raise FlowError(
                f"node {new.name!r} takes none of {sorted(old.outputs)}, the outputs of {old.name!r} "
                "-- name one of them in its inputs"
            )
        raw = {value: f"{old.name}.{value}" for value in old.outputs if value in new.outputs}
        pair = [_renamed(old, outputs=raw), _renamed(new, inputs=raw)]
        nodes: list[Node] = []
        for node in self.nodes:
            nodes.extend(pair if node.name == old.name else [node])
        self._rebuild(nodes)

    def waves(self) -> list[list[Node]]:
        """Nodes by depth: each wave needs only values of the waves before it."""
        made_later = {value for node in self.nodes for value in node.outputs}
        rest, waves = list(self.nodes), list[list[Node]]()
        while rest:
            wave = [node for node in rest if not made_later & set(node.inputs)]
            assert wave, "find_faults lets no cycle through"
            waves.append(wave)
            rest = [node for node in rest if node not in wave]
            made_later -= {value for node in wave for value in node.outputs}
        return waves

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
        lines: list[str] = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append(f"{cells[0]}  {cells[1]}  {cells[2]} -> {cells[3]}  {cells[4]}".rstrip())
        return "\n".join(lines)

    def _node(self, name: str) -> Node:
        if name in self._nodes:
            return self._nodes[name]
        makers = [node for node in self.nodes if name in node.outputs]
        if not makers:
            raise FlowError(
                f"the flow has no node {name!r}{nearest(name, self._nodes)} -- its nodes: {', '.join(self._nodes)}"
            )
        return makers[0]

    def _ancestors(self, names: Iterable[str]) -> set[str]:
        """These nodes and those whose outputs they need, however far up."""
        producers = {value: node.name for node in self.nodes for value in node.outputs}
        above: set[str] = set()
        queue = [self._node(name) for name in names]
        while queue:
            node = queue.pop()
            if node.name not in above:
                above.add(node.name)
                queue += [self._nodes[producers[value]] for value in node.inputs if value in producers]
        return above

    def _descendants(self, name: str) -> set[str]:
        """This node and those that need its outputs, however far down."""
        below = {self._node(name).name}
        for wave in self.waves():
            for node in wave:
                made = {value for other in below for value in self._nodes[other].outputs}
                if made & set(node.inputs):
                    below.add(node.name)
        return below

    def _rebuild(self, nodes: Sequence[Node]) -> None:
        # An edit may leave a source without a user (a constant in place of its reader); only a new Flow refuses that.
        raise_faults(find_faults(nodes, self._sources, self._absent, self._readers))
        self._nodes = self._wired(nodes)

    def _wired(self, nodes: Sequence[Node]) -> dict[str, Node]:
        """Nodes by name, without inputs that are absent here."""

        def present(node: Node) -> dict[str, StatedType]:
            return {value: stated for value, stated in node.inputs.items() if value not in self._absent}

        return {node.name: replace(node, inputs=present(node)) for node in nodes}


def _constant_node(old: Node, value: object) -> Node:
    if len(old.outputs) > 1 and (not isinstance(value, dict) or value.keys() != old.outputs.keys()):
        raise FlowError(
            f"node {old.name!r} has the outputs {sorted(old.outputs)}, and the constant does not say each "
            "-- give a dict with exactly these names"
        )

    def stand_in() -> object:
        return cast(object, value)

    return Node(old.name, stand_in, {}, old.outputs, group="constant")


def _function_node(old: Node, fn: Callable[..., object]) -> Node:
    """A function in the place of `old`: the inputs that it names, the outputs of `old`."""
    if not callable(fn):
        raise FlowError(f"node {old.name!r}: {fn!r} cannot be called -- give a function, a Node or a constant")
    if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(fn).parameters.values()):
        return replace(old, fn=fn)
    inputs, optional, _ = read_signature(fn, old.name)
    return replace(old, fn=fn, inputs=inputs, optional=optional)


def _map_node(old: Node, fn: Callable[..., object], taken: set[str]) -> Node:
    """A node that maps the single output of `old` to itself with fn."""
    if len(old.outputs) != 1:
        raise FlowError(
            f"node {old.name!r} has the outputs {sorted(old.outputs)}, and a plain function maps exactly one "
            "-- insert a Node that names its inputs and outputs"
        )
    own = fn_name(fn) if inspect.isfunction(fn) or inspect.ismethod(fn) else type(fn).__name__
    stem = f"after_{old.name}" if own == "<lambda>" else own
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1

    def mapped(**values: object) -> object:
        return fn(*values.values())

    return Node(name, mapped, old.outputs, old.outputs, old.group)


def _renamed(node: Node, inputs: Mapping[str, str] | None = None, outputs: Mapping[str, str] | None = None) -> Node:
    """The same node with values under other names (old -> new); its function still sees its own names."""
    new_in, new_out = inputs or {}, outputs or {}
    own_in = {new: old for old, new in new_in.items()}

    def fn(**values: object) -> dict[str, object]:
        made = node.call({own_in.get(name, name): value for name, value in values.items()})
        return {new_out.get(name, name): value for name, value in made.items()}

    return Node(
        node.name,
        fn,
        {new_in.get(name, name): stated for name, stated in node.inputs.items()},
        {new_out.get(name, name): stated for name, stated in node.outputs.items()},
        node.group,
        frozenset(new_in.get(name, name) for name in node.optional),
        makes_fields=True,
    )


def _values(stated: Mapping[str, StatedType]) -> str:
    return ", ".join(f"{name}: {kind_text(kind)}" for name, kind in stated.items()) or "(nothing)"
