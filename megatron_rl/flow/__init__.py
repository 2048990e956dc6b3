"""The dataflow of a step: nodes, their checks, and their execution."""

from __future__ import annotations

from megatron_rl.flow.graph import Flow, Node, constant

__all__ = ["Flow", "Node", "constant"]
