"""The CUDA kernel of rotary.py. It is bound by memory: each number is read once and written once."""

from __future__ import annotations

import torch

from megatron_rl.errors import MissingDependency

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency("RoPE on CUDA needs triton -- pip install triton") from error

# Tokens of a program.
_TOKENS = 32


@triton.jit
def _turn(source, target, cos, sin, sign, token_stride, head_stride, heads, head, rows, cols, inside, half, width):
    """One head of some tokens. Rounding after each operation, as torch's own have it."""
    at = source + rows[:, None] * token_stride + head * head_stride + cols[None, :]
    to = target + (rows[:, None] * heads + head) * width + cols[None, :]
    first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    angle = rows[:, None] * 2 * half + cols[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(dtype).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(dtype).to(tl.float32) * sign
    tl.store(to, (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32), mask=inside)
    tl.store(to + half, (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32), mask=inside)


@triton.jit
def _rotate_kernel(
    query, key, query_out, key_out, cos, sin, sign, query_token, query_head, key_token, key_head,
    tokens, heads, kv_heads, half, width, TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program some tokens of a head of the query, or of the key."""
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    cols = tl.arange(0, HALF)
    inside = (rows < tokens)[:, None] & (cols < half)[None, :]
    if head < heads:
        _turn(query, query_out, cos, sin, sign, query_token, query_head, heads, head, rows, cols, inside, half, width)
    else:
        other = head - heads
        _turn(key, key_out, cos, sin, sign, key_token, key_head, kv_heads, other, rows, cols, inside, half, width)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned by sign times the angle, contiguous; see rotary.rotate."""
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    query_out, key_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    (tokens, heads, width), kv_heads = query.shape, key.shape[1]
    rotary_dim = cos.shape[-1]
    if tokens:
        _rotate_kernel[(triton.cdiv(tokens, _TOKENS), heads + kv_heads)](  # pyright: ignore[reportIndexIssue]
            query, key, query_out, key_out, cos.contiguous(), sin.contiguous(), sign,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            tokens, heads, kv_heads, rotary_dim // 2, width,
            TOKENS=_TOKENS, HALF=triton.next_power_of_2(rotary_dim // 2),
            # A product and a sum in one would leave the rounding between them out.
            enable_fp_fusion=False,
        )  # fmt: skip
    if rotary_dim < width:
        query_out[..., rotary_dim:] = query[..., rotary_dim:]
        key_out[..., rotary_dim:] = key[..., rotary_dim:]
    return query_out, key_out
