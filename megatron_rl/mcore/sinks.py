"""Flash attention with a sink in each head: a learned logit in the softmax's denominator that belongs to no key (OpenAI
2025, gpt-oss; Miller 2023, "Attention is off by one").

With l the log-sum-exp over a query's keys and s the sink, probabilities shrink by sigmoid(l - s), and so does the
output. Backward, flash attention makes a query's probabilities anew from its log-sum-exp, and takes its output for the
mean of the gradients of the scores. Given logaddexp(l, s) and the output with the sink, both are those of the softmax
with the sink, whose value is 0: gradients of queries, keys and values come out exact. torch's own backward pass of its
log-sum-exp drops that gradient without a word, so that autograd through `varlen_attn` would be wrong.
"""

from __future__ import annotations

import torch

from megatron_rl.mcore.packing import Packed
from megatron_rl.ops.flash import PackedLens


def flash_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    packed: Packed,
    scale: float,
    window: int,
) -> torch.Tensor:
    """q, k and v [t, heads, d] of one width, sinks [heads] -> [t, heads, d]. CUDA, half precision. window: keys that a
    query sees, its own among them; 0: all.
    """
    return _FlashWithSinks.apply(query, key, value, sinks, packed.lens, scale, window)  # type: ignore[no-any-return]


def add_sink(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [t, heads, d] and log-sum-exp [heads, t] of attention without a sink -> those with it."""
    logit = sinks.float()[:, None]
    kept = (lse - logit).sigmoid().t()[..., None]
    return (out.float() * kept).to(out.dtype), torch.logaddexp(lse, logit.expand_as(lse)).contiguous()


def sink_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[heads]: of each sink, from the output's gradient [t, heads, d]. out, lse: with the sink."""
    share = (sinks.float()[:, None] - lse).exp()
    return -(share * (grad.float() * out.float()).sum(-1).t()).sum(1).to(sinks.dtype)


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        lens: PackedLens,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        plain, lse = varlen_attn(
            query, key, value, *lens, return_aux=AuxRequest(lse=True), scale=scale, window_size=(window - 1, 0)
        )
        # torch documents [t, heads], and its kernels give [heads, t].
        assert lse.shape == (query.shape[1], query.shape[0]), f"log-sum-exp {list(lse.shape)} of {list(query.shape)}"
        out, lse = add_sink(plain, lse, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.settings = lens, scale, window
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[no-untyped-def]
        query, key, value, sinks, out, lse = ctx.saved_tensors
        (cu_q, cu_k, max_q, max_k), scale, window = ctx.settings
        # No dropout, so no random numbers to repeat.
        rng, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, lse, cu_q, cu_k, max_q, max_k, 0.0, window == 0, rng, unused,
            scale=scale, window_size_left=window - 1, window_size_right=0,
        )  # fmt: skip
        return (*grads, sink_gradient(grad, out, lse, sinks), None, None, None)
