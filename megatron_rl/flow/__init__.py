"""The dataflow of a step: nodes, their checks, and their execution."""

from __future__ import annotations

from megatron_rl.flow.graph import Flow
from megatron_rl.flow.node import Node, absent, constant, node

__all__ = ["Flow", "Node", "absent", "constant", "node"]
