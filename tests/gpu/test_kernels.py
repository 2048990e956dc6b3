"""On a GPU: the log-probability kernels against the torch code that runs elsewhere, and what they cost in memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.logprobs import chunked_logprobs, make_inputs, peak_extra_bytes, torch_logprobs
from megatron_rl.ops.flash import FlashChoice

pytestmark = pytest.mark.gpu
VOCAB, PAD = 151_936, 128


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_torch_code(dtype: torch.dtype, temperature: float) -> None:
    """Statistics, and gradients with and without one of the entropy; a target on another rank; padding gets none."""
    from megatron_rl.ops.softmax import logit_grads_, row_stats

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(37, VOCAB + PAD, generator=generator).mul(3).to(dtype)
    columns = torch.randint(0, VOCAB, (37,), generator=generator)
    columns[::5] = -1
    plain = row_stats(logits.clone(), columns, VOCAB, temperature)
    fused = row_stats(logits.cuda(), columns.cuda(), VOCAB, temperature)
    peak = plain.peak.amax(dim=1)
    assert torch.allclose(fused.peak.amax(dim=1).cpu(), peak) and torch.allclose(fused.target.cpu(), plain.target)
    sums = [stats.rescaled(top) for stats, top in ((plain, peak), (fused, peak.cuda()))]
    for ours, torchs in zip(sums[1], sums[0], strict=True):
        assert torch.allclose(ours.cpu(), torchs, rtol=1e-5)
    total, weighted = sums[0]
    log_z, entropy = total.log() + peak, total.log() - weighted / total
    grads = [torch.randn(37, generator=generator) for _ in range(2)]
    for grad_entropy in (grads[1], None):
        found = []
        for device in ("cpu", "cuda"):
            given = None if grad_entropy is None else grad_entropy.to(device)
            args = {"log_z": log_z, "entropy": entropy, "grad_logprobs": grads[0]}
            args = {name: value.to(device) for name, value in args.items()}
            own = logits.to(device, copy=True)
            found.append(
                logit_grads_(own, columns.to(device), VOCAB, temperature, **args, grad_entropy=given).float().cpu()
            )
        assert (found[1] - found[0]).norm() / found[0].norm() < (1e-5 if dtype == torch.float32 else 1e-2)
        assert not found[1][:, VOCAB:].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_torchs_on_whole_logits(temperature: float) -> None:
    """Forward, and the gradients of hidden states and output matrix, in bfloat16."""
    inputs = make_inputs("cuda", 1500, VOCAB, 256, temperature)
    given = inputs.hidden, inputs.weight, inputs.targets
    found = []
    for method in (torch_logprobs, chunked_logprobs):
        logprobs = method(*given, temperature)
        grads = torch.autograd.grad(logprobs.mean(), (inputs.hidden, inputs.weight))
        found.append((logprobs.detach(), *grads))
    # A chunk's matrix product may round another way than the whole one's: rarely, and then by a bfloat16 step.
    assert (found[0][0] - found[1][0]).abs().mean() < 1e-4
    for torchs, ours in zip(found[0][1:], found[1][1:], strict=True):
        assert (ours.float() - torchs.float()).norm() / torchs.float().norm() < 1e-2


def test_the_forward_pass_needs_an_eighth_of_the_whole_logits() -> None:
    """8,192 tokens, vocabulary 151,936: what the whole float32 logits take is 4.6 GiB."""
    inputs = make_inputs("cuda", 8192, VOCAB, 896, 1.0)
    extra = peak_extra_bytes("cuda", lambda: inputs.run(chunked_logprobs, False))
    assert extra <= 8192 * VOCAB * 4 / 8


def _same(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """Equal in half precision, where both round alike; else to float32's last digits."""
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape
    if ours.dtype == torch.float32:
        assert torch.allclose(ours, torchs, rtol=1e-5, atol=1e-6)
    else:
        # exp() of the two differs in its last digit, which rarely moves a rounding.
        assert (ours != torchs).float().sum() <= 1e-3 * ours.numel()
        assert torch.allclose(ours.float(), torchs.float(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_equals_torchs_forward_and_backward(dtype: torch.dtype) -> None:
    from megatron_rl.ops.gated import plain_swiglu, swiglu

    generator = torch.Generator("cuda").manual_seed(0)
    for shape in ((37, 1, 2 * 4864), (5, 2 * 11), (0, 2 * 16)):
        rows = (3 * torch.randn(shape, generator=generator, device="cuda")).to(dtype).requires_grad_()
        ours, torchs = swiglu(rows), plain_swiglu(rows)
        grad = torch.randn(ours.shape, generator=generator, device="cuda").to(dtype)
        _same(ours, torchs)
        _same(*(torch.autograd.grad(out, rows, grad)[0] for out in (ours, torchs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [64, 32, 24])
def test_rope_equals_torchs_forward_and_backward(dtype: torch.dtype, rotary_dim: int) -> None:
    """Queries and keys are views of one product's output; a part of the head may stay as it is."""
    from megatron_rl.ops.rotary import apply_rotary, rotate

    generator = torch.Generator("cuda").manual_seed(0)
    mixed = torch.randn(77, 9, 64, generator=generator, device="cuda").to(dtype).requires_grad_()
    angle = 100 * torch.rand(77, 1, rotary_dim // 2, generator=generator, device="cuda")
    cos, sin = (torch.cat([half, half], -1) for half in (angle.cos(), angle.sin()))
    found = []
    for turn in (rotate, lambda q, k, c, s: (apply_rotary(q, c, s), apply_rotary(k, c, s))):
        query, key = turn(mixed[:, :6], mixed[:, 6:8], cos, sin)
        grads = torch.autograd.grad((query, key), mixed, (query.detach() * 2, key.detach() - 1))
        found.append((query, key, *grads))
    for ours, torchs in zip(*found, strict=True):
        _same(ours, torchs)


@pytest.mark.parametrize("kernel", ["torch", "fa4"])
@pytest.mark.parametrize("window", [0, 9])
def test_flash_attention_shares_key_heads(window: int, kernel: FlashChoice) -> None:
    """Two key heads of six query heads equal these keys written out for each, forward and backward."""
    from megatron_rl.mcore.attention import varlen_attention
    from megatron_rl.mcore.packing import Packed
    from megatron_rl.ops.flash import flash_kernel

    if kernel == "fa4":
        pytest.importorskip("flash_attn.cute")

    ends = torch.tensor([0, 5, 45, 130], dtype=torch.int32, device="cuda")
    packed = Packed(cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=85, max_seqlen_kv=85)
    generator = torch.Generator("cuda").manual_seed(0)
    mixed = torch.randn(130, 10, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(130, 6, 64, generator=generator, device="cuda").bfloat16()
    found = []
    views = mixed[:, 6:8], mixed[:, 8:]
    written_out = tuple(view.repeat_interleave(3, dim=1) for view in views)
    for (key, value), flash in ((views, flash_kernel(kernel)), (written_out, flash_kernel("torch"))):
        out = varlen_attention(mixed[:, :6], key, value, packed, 0.2, window, flash=flash)
        found.append((out, *torch.autograd.grad(out, mixed, grad)))
    for ours, written in zip(*found, strict=True):
        assert (ours.float() - written.float()).norm() / written.float().norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_to_float32_sums(dtype: torch.dtype) -> None:
    """Closer to the sum in float64 than the rounded product is."""
    from megatron_rl.ops.accumulate import add_product_

    generator = torch.Generator("cuda").manual_seed(0)
    total = torch.randn(96, 64, generator=generator, device="cuda")
    left, right = (torch.randn(500, size, generator=generator, device="cuda").to(dtype) for size in (96, 64))
    wanted = total.double() + left.double().t() @ right.double()
    found = add_product_(total, left, right)
    assert found.data_ptr() == total.data_ptr()
    assert (found.double() - wanted).abs().max() < (5e-2 if dtype == torch.float32 else 1e-4)


def test_fused_adamw_equals_torchs() -> None:
    from megatron_rl.mcore.adam import FusedInterfaceAdam

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (1000, 7)]
    grads = [[torch.randn(size, generator=generator) for size in (1000, 7)] for _ in range(5)]
    found = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(one.to(device, copy=True)) for one in start]
        optimizer = FusedInterfaceAdam(params, lr=1e-2, weight_decay=0.1)
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.to(device)
            optimizer.step()
        found.append([param.detach().cpu() for param in params])
    for ours, torchs in zip(*found, strict=True):
        assert torch.allclose(ours, torchs, rtol=1e-5, atol=1e-6)


def test_batched_copies_write_every_pair_and_nothing_else() -> None:
    """Pairs in one piece, of odd sizes, at odd addresses, of columns, and of two dtypes; twice, with other values."""
    from megatron_rl.ops.copies import CopyBatch

    generator = torch.Generator("cuda").manual_seed(0)
    source = torch.randn(3000, 256, generator=generator, device="cuda", dtype=torch.bfloat16)
    target = torch.full((4000, 256), 7.0, device="cuda", dtype=torch.bfloat16)
    wide = torch.full((64, 256), 7.0, device="cuda")
    flat_source, flat_target = source.view(-1), target.view(-1)
    rows = [((0, 0), 1), ((5, 64), 1000), ((1500, 1100), 129), ((1700, 2000), 0)]
    pairs = [(target[to : to + n], source[at : at + n]) for (to, at), n in rows]
    pairs.append((flat_target[256 * 3000 + 1 : 256 * 3000 + 8], flat_source[256 * 2000 + 3 : 256 * 2000 + 10]))
    pairs.append((target[3100:3200, 32:96], source[2100:2200, 64:128]))
    pairs.append((wide[:, :128], source[2300:2364, :128]))
    batch = CopyBatch(pairs)
    for _ in range(2):
        expected, expected_wide = torch.full_like(target, 7.0), torch.full_like(wide, 7.0)
        for (to, at), n in rows:
            expected[to : to + n] = source[at : at + n]
        expected.view(-1)[256 * 3000 + 1 : 256 * 3000 + 8] = flat_source[256 * 2000 + 3 : 256 * 2000 + 10]
        expected[3100:3200, 32:96] = source[2100:2200, 64:128]
        expected_wide[:, :128] = source[2300:2364, :128].float()
        batch.run()
        assert torch.equal(target, expected) and torch.equal(wide, expected_wide)
        source.normal_(generator=generator)


def test_batched_copies_go_through_any_buffer() -> None:
    """Rows, columns and an odd piece: packed into a buffer, and unpacked from it, by addresses that were taken once."""
    from megatron_rl.ops.copies import CopyBatch

    generator = torch.Generator("cuda").manual_seed(0)
    source = torch.empty(3000, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    sizes = [2 * 800 * 64, 2 * 129 * 256, 2 * 3]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, device="meta")
    columns, rows, odd = (part.view(torch.bfloat16) for part in staging.split(sizes))
    columns, rows = columns.view(800, 64), rows.view(129, 256)
    reads = source[:800, 8:72], source[900:1029], source.view(-1)[5:8]
    writes = target[100:900, 128:192], target[2000:2129], target.view(-1)[1:4]
    device = torch.device("cuda", torch.cuda.current_device())
    pack = CopyBatch(zip((columns, rows, odd), reads, strict=True), device)
    unpack = CopyBatch(zip(writes, (columns, rows, odd), strict=True), device)
    kept = []
    for _ in range(2):
        source.normal_(generator=generator)
        target.fill_(7.0)
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device="cuda")
        kept.append(buffer)
        pack.run(buffer)
        unpack.run(buffer)
        expected = torch.full_like(target, 7.0)
        expected[100:900, 128:192], expected[2000:2129] = reads[0], reads[1]
        expected.view(-1)[1:4] = reads[2]
        assert torch.equal(target, expected)
    assert kept[0].data_ptr() != kept[1].data_ptr()
