"""A layer's experts: one grouped product a projection against one expert after another. Prints one table.

    python -m benchmarks.experts                   # tiny, on the CPU: torch's grouped product is a loop there too
    python -m benchmarks.experts --device cuda     # a layer of Qwen3-30B-A3B, on a GPU, bfloat16

Tokens go to experts drawn at random, k each; forward and backward of both projections with the gate between them, as
mcore/experts.py computes them. A token is one before it is copied to its k experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.mcore.experts import grouped_linear, sequential_linear

Product = Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor]
PRODUCTS: dict[str, Product] = {"sequential": sequential_linear, "grouped": grouped_linear}


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer with experts."""

    experts: int
    topk: int
    hidden: int
    inner: int


SIZES = {"tiny": Layer(8, 2, 64, 32), "30b-a3b": Layer(128, 8, 2048, 768), "235b-a22b": Layer(128, 8, 4096, 1536)}


def run(product: Product, rows: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], counts: list[int]) -> None:
    """Forward and backward."""
    gate, up = product(rows, weights[0], counts).chunk(2, dim=-1)
    product(torch.nn.functional.silu(gate) * up, weights[1], counts).float().mean().backward()


def seconds(call: Callable[[], None], repeats: int, cuda: bool) -> float:
    """The median of several calls, after one that is not counted."""
    times: list[float] = []
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES))
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch; 64 on the CPU, 16384 on a GPU")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    size = args.size or ("30b-a3b" if cuda else "tiny")
    tokens, layer = args.tokens or (16384 if cuda else 64), SIZES[size]
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    chosen = torch.rand(tokens, layer.experts).topk(layer.topk, dim=1).indices
    counts: list[int] = torch.bincount(chosen.reshape(-1), minlength=layer.experts).tolist()
    options = {"dtype": dtype, "device": args.device}
    rows = torch.randn(sum(counts), layer.hidden, **options).requires_grad_()
    sizes = ((layer.experts, 2 * layer.inner, layer.hidden), (layer.experts, layer.hidden, layer.inner))
    first, second = (torch.randn(size, **options).mul_(0.02).requires_grad_() for size in sizes)
    print(f"{size}: {tokens} tokens, {layer.experts} experts, {layer.topk} a token, {dtype} on {args.device}")
    took: dict[str, float] = {}
    for name, product in PRODUCTS.items():
        took[name] = seconds(lambda product=product: run(product, rows, (first, second), counts), args.repeats, cuda)
        print(f"{name:12} {1e3 * took[name]:9.2f} ms  {tokens / took[name]:12,.0f} tokens/s")
    print(f"grouped is {took['sequential'] / took['grouped']:.2f} times as fast")


if __name__ == "__main__":
    main()
