"""Advantages of 1,024 sequences of 8,192 tokens: the kernels of csrc/ against other ways. Prints one table.

    python -m benchmarks.advantages                   # CPU kernels against this package's torch code
    python -m benchmarks.advantages --device cuda     # CUDA kernels against a loop over tokens and against copying

"scan" makes advantages, returns and the sums that whitening needs; "and whitened" is what PPO does with them. "us" is
of the device alone, "with checks" of a call from Python that reads whether the inputs could be. The loop is verl's
manner: padded tensors, one column of tokens after the other, a dozen small operators each. The bound is the bytes that
a scan has to read and write, at the rate at which the device copies 1 GiB. Aims: on CPUs 5 times the torch code; on
CUDA 100 times the loop, and at most 1.3 times the bound. Medians; two sets of inputs in turn on CPUs, four on CUDA, so
that no cache holds them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algos.gae import alone
from megatron_rl.algos.scan import TORCH, CreditKernels, KlPenalty
from megatron_rl.ops import advantages

GAMMA, LAM = 1.0, 0.95


@dataclass(frozen=True)
class Inputs:
    """[S, L] if padded, [T] with cu_seqlens if packed. Nine tokens in ten are trained."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor | None
    lam: float | torch.Tensor = LAM
    kl: KlPenalty | None = None

    def bytes_of_scan(self) -> int:
        """Read and written, at the least."""
        columns = [self.rewards, self.values, self.mask, *([] if self.kl is None else [self.kl.terms])]
        return sum(one.numel() * one.element_size() for one in columns) + 8 * self.rewards.numel()

    def scan(self, kernels: CreditKernels, whitened: bool) -> torch.Tensor:
        """Advantages, which wait for the device: the scan's own checks are read."""
        found = kernels.scan(
            self.rewards, self.values, self.mask, self.cu_seqlens, gamma=GAMMA, lam=self.lam, kl=self.kl
        )  # fmt: skip
        if not whitened:
            return found.advantages
        mean, std = found.moments.over_ranks(alone)
        return kernels.whiten(found.advantages, self.mask, self.cu_seqlens, None, mean, std)

    def scan_alone(self) -> torch.Tensor:
        """The operator, which waits for nothing."""
        lams = self.lam if isinstance(self.lam, torch.Tensor) else None
        lam = LAM if isinstance(self.lam, torch.Tensor) else self.lam
        terms, kind, coef = (None, 0, 0.0) if self.kl is None else (self.kl.terms, 1, self.kl.coef)
        return torch.ops.megatron_rl.gae(
            self.rewards, self.values, self.mask, self.cu_seqlens, None, terms, None, kind, coef,
            GAMMA, lam, lam, lams, lams,
        )[0]  # fmt: skip


def make_inputs(lens: Sequence[int], seed: int, device: str, padded: bool, kind: str) -> Inputs:
    """kind: float32, bfloat16, kl (with a penalty), lams (lambdas of sequences)."""
    generator = torch.Generator(device).manual_seed(seed)
    total = sum(lens)
    mask = torch.rand(total, generator=generator, device=device) < 0.9
    rewards, values = (torch.randn(total, generator=generator, device=device) for _ in range(2))
    rewards *= mask
    ends = torch.tensor([0, *lens]).cumsum(0).to(device)
    penalty = KlPenalty(0.1, torch.randn(total, generator=generator, device=device)) if kind == "kl" else None
    lam = torch.rand(len(lens), generator=generator, device=device).double() if kind == "lams" else LAM
    if kind == "bfloat16":
        rewards, values = rewards.bfloat16(), values.bfloat16()
    if padded:
        shape = (len(lens), lens[0])
        return Inputs(rewards.view(shape), values.view(shape), mask.view(shape), None, lam, penalty)
    return Inputs(rewards, values, mask, ends, lam, penalty)


def loop_over_tokens(inputs: Inputs) -> torch.Tensor:
    """Whitened advantages in verl's manner: a column of tokens at a time, from the last, in float32."""
    mask = inputs.mask.float()
    known = ahead = torch.zeros_like(inputs.values[:, 0])
    columns = list[torch.Tensor]()
    for t in range(inputs.values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        step = inputs.rewards[:, t] + GAMMA * known - inputs.values[:, t] + GAMMA * LAM * ahead
        known = inputs.values[:, t] * here + known * (1 - here)
        ahead = step * here + ahead * (1 - here)
        columns.append(ahead)
    found = torch.stack(columns[::-1], dim=1)
    count = mask.sum()
    mean = (found * mask).sum() / count
    deviation = (((found - mean).square() * mask).sum() / (count - 1)).sqrt()
    return (found - mean) / (deviation + 1e-8) * mask


def seconds_of(sets: Sequence[Inputs], work: Callable[[Inputs], object], repeats: int) -> float:
    """Median seconds of a call. On CUDA of 20 calls in a row, by events, which wait for the host where it is slower."""
    on_cuda, taken = sets[0].rewards.is_cuda, list[float]()
    for one in sets:
        work(one)
    for turn in range(repeats):
        if not on_cuda:
            start = time.perf_counter()
            work(sets[turn % len(sets)])
            taken.append(time.perf_counter() - start)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in range(20):
            work(sets[call % len(sets)])
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / 20)
    return statistics.median(taken)


def device_seconds_of(sets: Sequence[Inputs], work: Callable[[Inputs], object], repeats: int) -> float:
    """Median seconds of a call on the device alone: a graph of 20 calls, so that the host takes no part."""
    for one in sets:
        work(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(20):
            work(sets[call % len(sets)])
    return seconds_of(sets[:1], lambda _: graph.replay(), repeats) / 20


def copy_rate() -> float:
    """Bytes a second, read and written, of copying 1 GiB on the GPU."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    to, taken = torch.empty_like(source), list[float]()
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        to.copy_(source)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return 2 * 2**30 / statistics.median(taken[2:])


def on_cuda(sequences: int, length: int, repeats: int) -> None:
    """Table of the CUDA kernels."""
    rate, lens = copy_rate(), [length] * sequences
    print(f"{torch.cuda.get_device_name()}; {sequences:,} x {length:,} tokens; copies at {rate / 1e12:.2f} TB/s")
    print(f"{'scan':<34}{'us':>9}{'bound us':>10}{'times':>7}{'with checks':>13}{'and whitened':>14}")
    long = sequences * length // 2
    beside = [long, *[1000] * (long // 1000)]
    whitened = 0.0
    for name, of_lens, padded, kind in (
        ("padded", lens, True, "float32"),
        ("packed", lens, False, "float32"),
        ("packed, one of half the tokens", beside, False, "float32"),
        ("packed, bfloat16", lens, False, "bfloat16"),
        ("packed, KL in the reward", lens, False, "kl"),
        ("packed, lambdas of sequences", lens, False, "lams"),
    ):
        sets = [make_inputs(of_lens, seed, "cuda", padded, kind) for seed in range(4)]
        alone_s = device_seconds_of(sets, Inputs.scan_alone, repeats)
        checked = seconds_of(sets, lambda one: one.scan(advantages.KERNELS, False), repeats)
        white = seconds_of(sets, lambda one: one.scan(advantages.KERNELS, True), repeats)
        bound = sets[0].bytes_of_scan() / rate
        whitened = whitened or white
        print(f"{name:<34}{alone_s * 1e6:>9.1f}{bound * 1e6:>10.1f}{alone_s / bound:>7.2f}", end="")
        print(f"{checked * 1e6:>13.1f}{white * 1e6:>14.1f}")
    inputs = make_inputs(lens, 0, "cuda", True, "float32")
    loop_over_tokens(inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    loop = loop_over_tokens(inputs)
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    print(f"loop over tokens, whitened: {taken * 1e3:.1f} ms, {taken / whitened:,.0f} times the kernels'")
    print(f"largest difference: {float((loop - inputs.scan(advantages.KERNELS, True)).abs().max()):.1e}")


def on_cpu(sequences: int, length: int, repeats: int) -> None:
    """Table of the CPU kernels."""
    lens = [length] * sequences
    print(f"CPU, {torch.get_num_threads()} threads; {sequences:,} x {length:,} tokens; seconds")
    print(f"{'':<34}{'torch code':>11}{'kernels':>9}{'times':>7}")
    for name, of_lens, kind in (
        ("scan", lens, "float32"),
        ("scan, bfloat16", lens, "bfloat16"),
        ("scan, KL in the reward", lens, "kl"),
        ("scan, lambdas of sequences", lens, "lams"),
        ("scan, lengths from 1", [1 + s * 2 * length // sequences for s in range(sequences)], "float32"),
    ):
        for whitened in (False, True):
            sets = [make_inputs(of_lens, seed, "cpu", False, kind) for seed in range(2)]
            slow = seconds_of(sets, lambda one, white=whitened: one.scan(TORCH, white), 1)
            fast = seconds_of(sets, lambda one, white=whitened: one.scan(advantages.KERNELS, white), repeats)
            print(f"{name + ', whitened' * whitened:<34}{slow:>11.3f}{fast:>9.4f}{slow / fast:>7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.device not in advantages.built_for():
        raise SystemExit(f"the kernels of csrc/ are not built for {args.device}: {advantages.BUILD}")
    (on_cuda if args.device == "cuda" else on_cpu)(args.sequences, args.length, args.repeats)


if __name__ == "__main__":
    main()
