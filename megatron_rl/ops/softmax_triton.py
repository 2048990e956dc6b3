"""The CUDA kernels of softmax.py. Both are bound by memory: each logit is read once, and its gradient written once."""

from __future__ import annotations

import torch

from megatron_rl.errors import MissingDependency

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency("log-probabilities on CUDA need triton -- pip install triton") from error

# Columns of a program, and its warps: 16 elements a thread.
_BLOCK = 4096
_WARPS = 8


@triton.jit
def _stats_kernel(
    logits, columns, peak, total, weighted, target, stride, parts, valid, temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a row and block of columns, each with sums of its own."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    inside = cols < valid
    x = tl.load(logits + row * stride + cols, mask=inside, other=0.0).to(tl.float32) / temperature
    x = tl.where(inside, x, -1e30)
    top = tl.max(x, axis=0)
    shifted = x - top
    exp = tl.exp(shifted)
    at = row * parts + part
    tl.store(peak + at, top)
    tl.store(total + at, tl.sum(exp, axis=0))
    tl.store(weighted + at, tl.sum(exp * shifted, axis=0))
    column = tl.load(columns + row)
    here = (column >= part * BLOCK) & (column < (part + 1) * BLOCK)
    hit = tl.load(logits + row * stride + column, mask=here, other=0.0).to(tl.float32) / temperature
    tl.store(target + row, hit, mask=here)


@triton.jit
def _grads_kernel(
    logits, columns, log_z, entropy, grad_logprobs, grad_entropy, stride, width, valid, temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + cols
    inside = cols < width
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) / temperature
    log_p = x - tl.load(log_z + row)
    p = tl.exp(log_p)
    grad_lp = tl.load(grad_logprobs + row)
    grad = -p * (grad_lp + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row)))
    grad += tl.where(cols == tl.load(columns + row), grad_lp, 0.0)
    tl.store(at, tl.where(cols < valid, grad / temperature, 0.0), mask=inside)


def row_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """peak, total, weighted [n, parts] and target [n], float32; see softmax.row_stats. valid is above 0."""
    num_rows, parts = logits.shape[0], triton.cdiv(valid, _BLOCK)
    peak, total, weighted = (logits.new_empty(num_rows, parts, dtype=torch.float32) for _ in range(3))
    target = logits.new_zeros(num_rows, dtype=torch.float32)
    if num_rows:
        _stats_kernel[(num_rows, parts)](  # pyright: ignore[reportIndexIssue]
            logits, columns, peak, total, weighted, target, logits.stride(0), parts, valid, temperature,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return peak, total, weighted, target


def logit_grads_(
    logits: torch.Tensor,
    columns: torch.Tensor,
    valid: int,
    temperature: float,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> None:
    """Overwrites logits [n, v] with their gradient; see softmax.logit_grads_."""
    num_rows, width = logits.shape
    rows = [values.contiguous() for values in (log_z, entropy, grad_logprobs, grad_entropy)]
    if num_rows:
        _grads_kernel[(num_rows, triton.cdiv(width, _BLOCK))](  # pyright: ignore[reportIndexIssue]
            logits, columns, *rows, logits.stride(0), width, valid, temperature,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
