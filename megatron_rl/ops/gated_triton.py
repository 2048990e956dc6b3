"""The CUDA kernels of gated.py. Both are bound by memory: each number is read once and written once."""

from __future__ import annotations

import torch

from megatron_rl.errors import MissingDependency

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency("gated MLPs on CUDA need triton -- pip install triton") from error

# Columns of a program.
_BLOCK = 1024


@triton.jit
def _forward_kernel(rows, out, width, BLOCK: tl.constexpr):
    """One program a row and block of columns. Rounding after each operation, as torch's own have it."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(rows + row * 2 * width + cols, mask=inside, other=0.0)
    up = tl.load(rows + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + cols, silu * up, mask=inside)


@triton.jit
def _backward_kernel(rows, grad, grad_rows, width, BLOCK: tl.constexpr):
    """One program a row and block of columns, with both gradients there."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    at_gate = row * 2 * width + cols
    gate = tl.load(rows + at_gate, mask=inside, other=0.0)
    up = tl.load(rows + at_gate + width, mask=inside, other=0.0).to(tl.float32)
    out_grad = tl.load(grad + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = (wide * sigmoid).to(gate.dtype).to(tl.float32)
    silu_grad = (out_grad * up).to(gate.dtype).to(tl.float32)
    tl.store(grad_rows + at_gate, silu_grad * sigmoid * (1.0 + wide * (1.0 - sigmoid)), mask=inside)
    tl.store(grad_rows + at_gate + width, out_grad * silu, mask=inside)


def swiglu(rows: torch.Tensor) -> torch.Tensor:
    """[..., 2 f] contiguous -> [..., f]; see gated.swiglu."""
    width = rows.shape[-1] // 2
    out = rows.new_empty(*rows.shape[:-1], width)
    if out.numel():
        _forward_kernel[(out.numel() // width, triton.cdiv(width, _BLOCK))](  # pyright: ignore[reportIndexIssue]
            rows, out, width, BLOCK=_BLOCK
        )
    return out


def swiglu_grads(rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of rows [..., 2 f] from that of the output [..., f]; both contiguous."""
    width = grad.shape[-1]
    grad_rows = torch.empty_like(rows)
    if grad.numel():
        _backward_kernel[(grad.numel() // width, triton.cdiv(width, _BLOCK))](  # pyright: ignore[reportIndexIssue]
            rows, grad, grad_rows, width, BLOCK=_BLOCK
        )
    return grad_rows
