"""Milliseconds of attention over packed sequences, forward and backward, by each kernel. Prints one table.

    python -m benchmarks.flash                   # SDPA over padded groups, a small shape on the CPU
    python -m benchmarks.flash --device cuda     # torch's flash attention, and flash-attn-4 where it is installed

Causal, bfloat16 on a GPU; the mean of five calls after two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from megatron_rl.mcore import cpu
from megatron_rl.ops.flash import Flash, flash_kernel

SHAPES = {
    "cpu": {"small": ([64] * 2, 4, 2, 16)},
    "cuda": {
        "51 x 640": ([640] * 51, 14, 2, 64),
        "4 x 8,192": ([8192] * 4, 16, 8, 128),
        "2 x 16,384": ([16384] * 2, 16, 8, 128),
        "100 to 8,192": ([100, 3000, 8192, 5000], 16, 8, 128),
    },
}
"""Name -> lengths, query heads, key heads, dims of a head."""


def milliseconds(work: Callable[[], object], device: str) -> float:
    """The mean of five calls after two."""
    for number in range(7):
        if number == 2:
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / 5 * 1e3


def measure(
    lens: list[int], heads: int, kv_heads: int, dims: int, device: str, flash: Flash | None
) -> tuple[float, ...]:
    """Milliseconds forward and backward. flash: None for SDPA over padded groups."""
    from megatron_rl.mcore.attention import grouped_attention, varlen_attention
    from megatron_rl.mcore.packing import pack
    from megatron_rl.types import TrainBatch

    tokens, dtype = sum(lens), torch.bfloat16 if device == "cuda" else torch.float32
    mask = torch.ones(tokens, dtype=torch.bool)
    packed = pack(
        TrainBatch(torch.zeros(tokens, dtype=torch.int64), tuple(lens), mask, {"loss_weights": mask.float()}),
        rotary_dim=dims, rotations=[], windows=(), vocab_size=8, device=torch.device(device),
    ).packed  # fmt: skip
    query, key, value = (
        torch.randn(tokens, count, dims, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )

    def forward() -> torch.Tensor:
        if flash is None:
            return grouped_attention(query, key, value, packed, dims**-0.5)
        return varlen_attention(query, key, value, packed, dims**-0.5, flash=flash)

    out = forward()
    grad = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True), device)
    return milliseconds(forward, device), backward


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    cpu.install()
    kernels: dict[str, Flash | None] = {"padded": None}
    if device == "cuda":
        kernels = {"torch": flash_kernel("torch")}
        try:
            kernels["fa4"] = flash_kernel("fa4")
        except ImportError as error:
            print(error)
    print(f"{'':<16}{'kernel':<10}{'forward':>9}{'backward':>10}")
    for name, (lens, heads, kv_heads, dims) in SHAPES[device].items():
        for kernel, flash in kernels.items():
            forward, backward = measure(lens, heads, kv_heads, dims, device, flash)
            print(f"{name:<16}{kernel:<10}{forward:>9.3f}{backward:>10.3f}")


if __name__ == "__main__":
    main()
