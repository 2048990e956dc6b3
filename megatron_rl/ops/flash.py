"""Flash attention over packed sequences on CUDA: torch's own, of the second generation (Dao 2023), or the fourth, of
the package flash-attn-4.

Both are exact, and share key heads among query heads without copies of them. The fourth is compiled at the first call
of a head size, forward and backward, in three seconds each; `benchmarks/flash.py` compares the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from megatron_rl.errors import MissingDependency

FlashChoice = Literal["torch", "fa4"]


class PackedLens(NamedTuple):
    """Where sequences end among the queries and among the keys, [S + 1] int32 from 0 on, and the longest of each."""

    ends_q: torch.Tensor
    ends_kv: torch.Tensor
    max_q: int
    max_kv: int


Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedLens, float, int], torch.Tensor]
"""(q [t, heads, d], k and v [s, kv_heads, d], lens, scale, window: keys that a query sees, its own among them, 0: all)
-> [t, heads, d]; causal, bfloat16 or float16"""
_FA4_GPUS = (9, 10)


def torch_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: PackedLens, scale: float, window: int
) -> torch.Tensor:
    """See Flash: torch's variable-length attention."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, *lens, scale=scale, window_size=(window - 1, 0), **_shared_heads(varlen_attn))
    assert isinstance(out, torch.Tensor)
    return out


def _shared_heads(attention: Callable[..., object]) -> dict[str, Any]:
    """What says that query heads share key heads: nothing in torch 2.11, whose kernels take that unasked."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(attention).parameters else {}


def fa4_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: PackedLens, scale: float, window: int
) -> torch.Tensor:
    """See Flash: that of flash-attn-4."""
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    query, key, value = (one.contiguous() for one in (query, key, value))
    out, _ = flash_attn_varlen_func(
        query, key, value,
        cu_seqlens_q=lens.ends_q, cu_seqlens_k=lens.ends_kv, max_seqlen_q=lens.max_q, max_seqlen_k=lens.max_kv,
        softmax_scale=scale, causal=window == 0, window_size=(window - 1, 0) if window else (None, None),
    )  # fmt: skip
    return out


def flash_kernel(choice: FlashChoice) -> Flash:
    """The kernel of that name. Raises MissingDependency if it does not run here."""
    if choice == "torch":
        return torch_flash
    if (obstacle := _fa4_obstacle()) is not None:
        raise MissingDependency(
            f"actor.flash_attention=fa4: {obstacle} -- pip install 'flash-attn-4[cu13]', or set it to torch"
        )
    return fa4_flash


def _fa4_obstacle() -> str | None:
    """Why the fourth generation does not run here; None if it does."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major not in _FA4_GPUS:
        return f"it is for GPUs of compute capability 9 and 10, and this has {major}.{minor}"
    try:
        import flash_attn.cute  # noqa: F401  # pyright: ignore
    except ImportError as error:
        return f"flash-attn-4 cannot be imported ({error})"
    return None
