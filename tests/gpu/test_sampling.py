"""On GPUs: the kernel that samples draws what the torch code draws."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.ops.sampling import sample, sample_torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 300, 4096, 50257, 151936])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_the_kernel_draws_what_the_torch_code_draws(dtype: torch.dtype, size: int, temperature: float) -> None:
    """Nearly always: logarithms differ in the last bits, and two entries can be that close. Log-probabilities of the
    same tokens are equal to 2e-5. Equal logits, of which bfloat16 has many: the first one is the greedy choice.
    """
    generator = torch.Generator("cuda").manual_seed(size)
    rows = 64
    logits = 3 * torch.randn(rows, size, device="cuda", generator=generator).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda", generator=generator)
    positions = torch.randint(0, 2**20, (rows,), device="cuda", generator=generator)
    tokens, logprobs = sample(logits, temperature, seeds, positions)
    wanted, wanted_logprobs = sample_torch(logits, temperature, seeds, positions)
    same = tokens == wanted
    assert int(same.sum()) >= (rows if temperature == 0 else rows - 1)
    assert torch.allclose(logprobs[same], wanted_logprobs[same], atol=2e-5, rtol=1e-5)
