"""Attention sinks: a further key on the padded path, and what flash attention is given on the other one."""

from __future__ import annotations

import torch

from megatron_rl.mcore.attention import with_sink_key
from megatron_rl.mcore.sinks import add_sink, sink_gradient

SCALE = 0.3


def _inputs() -> tuple[torch.Tensor, ...]:
    """q [t, heads, d], k and v, sinks, the output's gradient; double precision."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(7, 4, 6, dtype=torch.float64) for _ in range(4))
    return q, k, v, 2.0 * torch.randn(4, dtype=torch.float64), grad


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(7, 7, dtype=torch.bool).tril() & torch.ones(7, 7, dtype=torch.bool).triu(-2)
    return (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill(~mask, float("-inf"))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """As gpt-oss is defined: the softmax over the keys and the sink, whose probability is dropped."""
    scores = torch.cat([_scores(q, k), sinks[:, None, None].expand(-1, 7, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What the kernel computes (Dao 2023, FlashAttention-2, algorithm 2), of the output and log-sum-exp it is given."""
    probs = (_scores(q, k) - lse[..., None]).exp()
    mean = (grad * out).sum(-1).t()[..., None]
    of_scores = probs * (torch.einsum("qhd,khd->hqk", grad, v) - mean) * SCALE
    of_v = torch.einsum("hqk,qhd->khd", probs, grad)
    return torch.einsum("hqk,khd->qhd", of_scores, k), torch.einsum("hqk,qhd->khd", of_scores, q), of_v


def test_flash_attention_with_the_sinks_output_and_log_sum_exp_has_their_gradients() -> None:
    q, k, v, sinks, grad = _inputs()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    wanted = _attention(*leaves)
    wanted.backward(grad)
    scores = _scores(q, k)
    plain, plain_lse = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)
    out, lse = add_sink(plain, plain_lse, sinks)
    assert torch.allclose(out, wanted, atol=1e-6)
    made = (*_flash_backward(grad, q, k, v, out, lse), sink_gradient(grad, out, lse, sinks))
    for gradient, leaf in zip(made, leaves, strict=True):
        assert leaf.grad is not None and leaf.grad.abs().max() > 0.1
        assert (gradient - leaf.grad).abs().max() < 1e-5


def test_one_more_key_is_a_sink_for_heads_that_share_keys() -> None:
    q, k, v, sinks, grad = _inputs()
    k, v = k[:, :2], v[:, :2]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    keys, values = (x.repeat_interleave(2, dim=1) for x in leaves[1:3])
    wanted = _attention(leaves[0], keys, values, leaves[3])
    wanted.backward(grad)
    ours = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    mask = (_scores(q, q) > float("-inf"))[:1, None]
    heads = [x.transpose(0, 1)[None] for x in ours[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(made := with_sink_key(heads[0], heads[1], heads[2], mask, ours[3] / SCALE))[:3],
        attn_mask=made[3], scale=SCALE, enable_gqa=True,
    )  # fmt: skip
    out = out[0, ..., :6].transpose(0, 1)
    assert torch.allclose(out, wanted, atol=1e-12)
    out.backward(grad)
    for mine, leaf in zip(ours, leaves, strict=True):
        assert mine.grad is not None and leaf.grad is not None and torch.allclose(mine.grad, leaf.grad, atol=1e-10)
