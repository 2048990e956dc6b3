"""Bounds on what a config's YAML may ask for: a few hundred bytes of aliases can stand for more than memory holds."""

from __future__ import annotations

from typing import Any, cast

import yaml
from yaml.composer import ComposerError

MAX_BYTES = 500_000
"""Longest config file; verl's resolved configs have some 50,000 bytes."""
MAX_TEXT = 100_000
"""Most characters of one text."""
MAX_DEPTH = 50
"""Deepest nesting of mappings and lists."""
MAX_NODES = 10_000
"""Most values of a config, each alias counted as what it stands for."""


class Bounded:
    """Mixed into a loader: stops reading at a value that is nested too deep, or at too many values."""

    _depth = 0
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As the loader's, with a count of levels and values."""
        self._depth += 1
        self._nodes += 1
        mark = cast(Any, self).peek_event().start_mark
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, f"nested over {MAX_DEPTH} levels deep", mark)
        if self._nodes > MAX_NODES:
            raise ComposerError(None, None, f"more than {MAX_NODES} values in one config", mark)
        node = cast(Any, super()).compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_TEXT:
            raise ComposerError(None, None, f"a text of more than {MAX_TEXT} characters", mark)
        return node


def expansion(root: yaml.Node) -> tuple[int, str, str] | None:
    """(line, what is wrong, what to do) of a text whose aliases hold themselves, or stand for too much; else None."""
    line = root.start_mark.line + 1
    try:
        sizes: dict[int, tuple[int, int]] = {}
        size, depth = _measure(root, sizes, set())
    except ComposerError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else line
        return line, str(error.problem), "write the value out in place of the alias"
    if size > MAX_NODES or depth > MAX_DEPTH:
        reason = (
            f"its aliases stand for {size} values, {depth} levels deep; at most {MAX_NODES} and {MAX_DEPTH} are read"
        )
        return line, reason, "write the few values that the run needs"
    return None


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """(values, levels) of a node with its aliases written out; each node is visited once."""
    if id(node) in sizes:
        return sizes[id(node)]
    if id(node) in above:
        raise ComposerError(None, None, "the mapping holds itself", node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        return 1, 0
    above.add(id(node))
    values = cast("list[Any]", node.value)
    children: list[Any] = [
        child for pair in values for child in cast(Any, pair if isinstance(pair, tuple) else (pair,))
    ]
    found = [_measure(child, sizes, above) for child in children]
    above.discard(id(node))
    sizes[id(node)] = (1 + sum(size for size, _ in found), 1 + max((depth for _, depth in found), default=0))
    return sizes[id(node)]
