"""Products that are added to float32 sums: gradients of weights, over micro-batches or parts of one."""

from __future__ import annotations

import torch


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """total += left^T right, in place: [m, n] float32, [t, m], [t, n].

    On CUDA a product of half precision is added before it is rounded, without a tensor of its own.
    """
    if left.dtype == total.dtype:
        return total.addmm_(left.t(), right)
    if left.is_cuda:
        return torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    return total.add_(torch.mm(left.t(), right))
