"""SwiGLU: silu(gate) * up (Shazeer 2020), one pass over memory forward and one backward.

On CUDA each is one Triton kernel (gated_triton.py), and the input alone is kept for the backward pass. Elsewhere it is
the torch code below, which is also what the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch


def swiglu(rows: torch.Tensor) -> torch.Tensor:
    """[..., 2 f], gates before ups, -> [..., f] in the same dtype.

    silu(gate) is rounded to that dtype before the product, as transformers and vLLM do.
    """
    return _SwiGLU.apply(rows) if rows.is_cuda else plain_swiglu(rows)  # type: ignore[no-any-return]


def plain_swiglu(rows: torch.Tensor) -> torch.Tensor:
    """What swiglu computes, in torch's own operations."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        """See swiglu."""
        from megatron_rl.ops import gated_triton

        rows = rows.contiguous()
        ctx.save_for_backward(rows)
        return gated_triton.swiglu(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """The gradient of rows, from that of the output."""
        from megatron_rl.ops import gated_triton

        (rows,) = ctx.saved_tensors
        return gated_triton.swiglu_grads(rows, grads[0].contiguous())
