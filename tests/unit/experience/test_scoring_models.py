from __future__ import annotations

import pytest

from megatron_rl.experience.scoring_models import nodes_for


@pytest.mark.parametrize(
    ("copies", "nnodes", "per_node", "nodes"),
    [
        (2, 1, 1, 1),  # one node has what it has
        (8, 4, 8, 1),
        (16, 4, 8, 2),
        (24, 4, 8, 3),
        (9, 4, 8, 3),
        (40, 4, 8, 1),  # more than there are
    ],
)
def test_copies_lie_on_as_few_nodes_as_have_a_gpu_for_each(copies: int, nnodes: int, per_node: int, nodes: int) -> None:
    assert nodes_for(copies, nnodes, per_node) == nodes
