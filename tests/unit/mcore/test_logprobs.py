"""Log-probabilities and entropies straight from hidden states: exact against torch, forward and backward, in chunks."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.mcore import logprobs
from megatron_rl.mcore.logprobs import HeadMemory, VocabShard, linear_logprobs
from megatron_rl.ops.softmax import LOWEST, logit_grads_, row_stats

TOKENS, HIDDEN, VOCAB = 300, 24, 1000
PAD = 24


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB + PAD, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden @ weight[:VOCAB].t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("rows", [TOKENS, 128, 7], ids=["one-chunk", "whole-tiles", "rest"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_torch(monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float) -> None:
    """Within float32's precision, whatever the chunks; the padding of the vocabulary has no probability."""
    monkeypatch.setattr(logprobs, "_CHUNK_BYTES", rows * (VOCAB + PAD) * 4)
    hidden, weight, targets = _inputs()
    wanted = _exact(hidden, weight, targets, temperature)
    probes = torch.linspace(-1, 1, TOKENS), torch.linspace(2, -1, TOKENS)
    exact = torch.autograd.grad((wanted[0] * probes[0] + wanted[1] * probes[1]).sum(), (hidden, weight))
    h, w, _ = _inputs(torch.float32)
    logprob, entropy, greedy = linear_logprobs(h, w, targets, temperature, VocabShard(0, VOCAB, None))
    assert logprob.dtype == entropy.dtype == torch.float32
    assert (logprob - wanted[0]).abs().max() < 2e-5 and (entropy - wanted[1]).abs().max() < 2e-5
    assert torch.equal(greedy, (hidden @ weight[:VOCAB].t()).argmax(-1) == targets)
    found = torch.autograd.grad((logprob * probes[0] + entropy * probes[1]).sum(), (h, w))
    for ours, torchs in zip(found, exact, strict=True):
        assert (ours - torchs).norm() / torchs.norm() < 1e-5
    assert not found[1][VOCAB:].any()


def test_an_entropy_that_no_loss_uses_changes_no_gradient() -> None:
    hidden, weight, targets = _inputs(torch.float32)
    shard = VocabShard(0, VOCAB, None)
    logprob, entropy, _ = linear_logprobs(hidden, weight, targets, 1.0, shard)
    alone = torch.autograd.grad(logprob.sum(), (hidden, weight), retain_graph=True)
    both = torch.autograd.grad(logprob.sum() + 0.0 * entropy.sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, both, strict=True))
    only = torch.autograd.grad(linear_logprobs(hidden, weight, targets, 1.0, shard)[1].sum(), hidden)[0]
    assert torch.isfinite(only).all() and only.any()


@pytest.mark.parametrize("rows", [0, 130, TOKENS])
def test_kept_logits_change_no_gradient(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """None, whole tiles of what memory allows, or all are kept; a second backward pass does not read what the first
    wrote over them.
    """
    row_bytes = (VOCAB + PAD) * 4
    monkeypatch.setattr(logprobs, "_CHUNK_BYTES", 50 * row_bytes)
    hidden, weight, targets = _inputs(torch.float32)
    shard, products = VocabShard(0, VOCAB, None), []
    plain = linear_logprobs(hidden, weight, targets, 0.7, shard)
    real = torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        if right.shape[1] == VOCAB + PAD:
            products.append(left.shape[0])
        return real(left, right, **out)

    kept = linear_logprobs(hidden, weight, targets, 0.7, shard, HeadMemory(rows * row_bytes))
    assert all(torch.allclose(ours, other, atol=1e-6) for ours, other in zip(kept, plain, strict=True))
    probes = torch.linspace(-1, 1, TOKENS), torch.linspace(2, -1, TOKENS)
    wanted = torch.autograd.grad((plain[0] * probes[0] + plain[1] * probes[1]).sum(), (hidden, weight))
    monkeypatch.setattr(torch, "mm", counted)
    for again in (TOKENS - (rows if rows == TOKENS else rows // 128 * 128), TOKENS):
        products.clear()
        loss = (kept[0] * probes[0] + kept[1] * probes[1]).sum()
        found = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        assert sum(products) == again
        for ours, other in zip(found, wanted, strict=True):
            assert (ours - other).norm() / other.norm() < 1e-6


def test_the_gradient_of_the_weight_can_go_to_a_sum() -> None:
    """It is added to what is there, and what autograd gets is zeros."""
    hidden, weight, targets = _inputs(torch.float32)
    shard, total = VocabShard(0, VOCAB, None), torch.ones(VOCAB + PAD, HIDDEN)
    wanted = torch.autograd.grad(linear_logprobs(hidden, weight, targets, 1.0, shard)[0].sum(), (hidden, weight))
    logprob, _, _ = linear_logprobs(hidden, weight, targets, 1.0, shard, HeadMemory(grad_sum=total))
    found = torch.autograd.grad(logprob.sum(), (hidden, weight))
    assert torch.equal(found[0], wanted[0]) and not found[1].any()
    assert torch.allclose(total - 1.0, wanted[1], atol=1e-5)


def test_no_tokens_are_no_error() -> None:
    """A micro-batch of padding alone trains nothing."""
    hidden, weight, targets = _inputs(torch.float32)
    logprob, _, _ = linear_logprobs(hidden[:0], weight, targets[:0], 1.0, VocabShard(0, VOCAB, None))
    logprob.sum().backward()
    assert logprob.shape == (0,) and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("valid", [VOCAB, 0])
def test_row_statistics_and_gradients(dtype: torch.dtype, valid: int) -> None:
    """Against the formulas in float64; a part of the vocabulary without a real column gives sums of zero."""
    logits = torch.randn(5, VOCAB + PAD, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    columns = torch.tensor([3, -1, 0, valid - 1, 17]) if valid else torch.full((5,), -1)
    x = logits.double()[:, :valid] / 0.7
    stats = row_stats(logits.clone(), columns, valid, 0.7)
    if not valid:
        assert (stats.peak == LOWEST).all() and not stats.total.any() and not stats.weighted.any()
    else:
        shifted = x - x.amax(1, keepdim=True)
        assert torch.allclose(stats.total[:, 0].double(), shifted.exp().sum(1), rtol=1e-6)
        assert torch.allclose(stats.weighted[:, 0].double(), (shifted.exp() * shifted).sum(1), rtol=1e-6)
        assert stats.target.tolist() == pytest.approx(
            [float(x[i, c]) if c >= 0 else 0.0 for i, c in enumerate(columns)]
        )
    log_z = torch.logsumexp(x, 1) if valid else torch.zeros(5)
    p = (x - log_z[:, None]).exp()
    entropy = -(p * p.clamp(min=1e-300).log()).sum(1)
    g, k = torch.linspace(-1, 1, 5).double(), torch.linspace(1, 2, 5).double()
    wanted = torch.zeros(5, VOCAB + PAD, dtype=torch.float64)
    wanted[:, :valid] = -p * (g[:, None] + k[:, None] * (x - log_z[:, None] + entropy[:, None]))
    for row, column in enumerate(columns.tolist()):
        if column >= 0:
            wanted[row, column] += g[row]
    found = logit_grads_(
        logits, columns, valid, 0.7,
        log_z=log_z.float(), entropy=entropy.float(), grad_logprobs=g.float(), grad_entropy=k.float(),
    )  # fmt: skip
    assert found.dtype == dtype
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert (found.double() - wanted / 0.7).abs().max() < limit * 3
