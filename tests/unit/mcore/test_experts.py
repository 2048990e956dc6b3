"""Stacks of experts: both products against each expert by itself, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_rl.mcore.experts import grouped_linear, sequential_linear

Product = Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor]
COUNTS = [3, 0, 9, 5, 0]


@pytest.mark.parametrize("product", [sequential_linear, grouped_linear])
@pytest.mark.parametrize("counts", [COUNTS, COUNTS[::-1]])
def test_products_of_a_stack_equal_each_expert_by_itself(product: Product, counts: list[int]) -> None:
    """Rows of one expert see no other's weight; an expert without rows has the gradient 0, not none."""
    torch.manual_seed(0)
    weight = torch.randn(len(counts), 16, 8, requires_grad=True)
    rows = torch.randn(sum(counts), 8, requires_grad=True)
    scale = torch.randn(sum(counts), 16)
    out = product(rows, weight, counts)
    (out * scale).sum().backward()
    assert weight.grad is not None and rows.grad is not None
    at = 0
    for expert, count in enumerate(counts):
        mine = slice(at, at + count)
        torch.testing.assert_close(out[mine], rows[mine] @ weight[expert].T)
        torch.testing.assert_close(rows.grad[mine], scale[mine] @ weight[expert].detach())
        torch.testing.assert_close(weight.grad[expert], scale[mine].T @ rows[mine].detach())
        at += count
