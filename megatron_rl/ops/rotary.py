"""RoPE on queries and keys (Su et al. 2021), in one pass over both.

On CUDA the pass is one Triton kernel (rotary_triton.py), and its backward the same kernel turning the other way.
Elsewhere it is the torch code below, which is also what the kernel is tested against.
"""

from __future__ import annotations

from typing import Any

import torch


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned: [t, heads, head_dim] and [t, kv_heads, head_dim] by [t, 1, rotary_dim], as apply_rotary does each.

    cos and sin: float32, without gradients; the second half of their last dim repeats the first.
    """
    if query.is_cuda:
        return _Rotate.apply(query, key, cos, sin)  # type: ignore[no-any-return]
    return apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim numbers of [t, heads, head_dim] by [t, 1, rotary_dim]; in x's dtype, as transformers
    and vLLM do.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rotate."""
        from megatron_rl.ops import rotary_triton

        ctx.save_for_backward(cos, sin)
        return rotary_triton.rotate(query, key, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Gradients of query and key: those of the outputs, turned back."""
        from megatron_rl.ops import rotary_triton

        cos, sin = ctx.saved_tensors
        query, key = rotary_triton.rotate(grads[0], grads[1], cos, sin, -1.0)
        return query, key, None, None
