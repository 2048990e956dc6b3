"""Log-probabilities from hidden states: this package's chunks against torch on whole logits. Prints one table.

    python -m benchmarks.logprobs                  # small, on the CPU, float32
    python -m benchmarks.logprobs --device cuda    # vocabulary 151,936, 8,192 tokens, hidden 896 and 4,096, bfloat16

Both start from the same hidden states and output matrix. torch: logits = (hidden @ weight.T).float(), log_softmax,
gather (and autograd through them). This package's also returns entropies and greedy hits. Extra memory is the peak
above what was held before the call, results included; the whole float32 logits are its unit. Aims: forward at most 1/8
of them, and no slower than torch.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.mcore.logprobs import VocabShard, linear_logprobs

Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def torch_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[n] float32 over whole logits."""
    logits = torch.mm(hidden, weight.t()).float()
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def chunked_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[n] float32, logits a chunk at a time."""
    return linear_logprobs(hidden, weight, targets, temperature, VocabShard(0, weight.shape[0], None))[0]


METHODS: dict[str, Method] = {"torch": torch_logprobs, "megatron_rl": chunked_logprobs}


@dataclass(frozen=True)
class Inputs:
    """hidden [n, h], weight [v, h], targets [n]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    temperature: float

    def run(self, method: Method, backward: bool) -> torch.Tensor:
        """Log-probabilities; backward: through their mean too."""
        with torch.set_grad_enabled(backward):
            found = method(self.hidden, self.weight, self.targets, self.temperature)
        if backward:
            found.mean().backward()
            self.hidden.grad = self.weight.grad = None
        return found.detach()


def make_inputs(device: str, tokens: int, vocab: int, hidden: int, temperature: float) -> Inputs:
    """Logits with a spread of about 3, as a language model has."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator, device=device) * 3.0 * hidden**-0.5).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    return Inputs(rows.requires_grad_(), weight.requires_grad_(), targets, temperature)


def peak_extra_bytes(device: str, call: Callable[[], object]) -> int:
    """Peak memory during `call` above what was held before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Linux: 5 resets the peak of the resident set.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def seconds(device: str, call: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` calls after two that warm up (kernels compile, memory is cached)."""
    taken = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int)
    args = parser.parse_args()
    small = args.device == "cpu"
    tokens, vocab = args.tokens or (2048 if small else 8192), args.vocab or (65536 if small else 151936)
    whole = tokens * vocab * 4
    name = torch.cuda.get_device_name() if not small else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; {tokens} tokens, vocabulary {vocab}, temperature {args.temperature}")
    print(f"whole float32 logits: {whole / 2**20:,.0f} MiB")
    print(f"{'hidden':>7}  {'pass':<16} {'method':<12} {'ms':>9}  {'of torch':>8}  {'extra MiB':>10}  {'of logits':>9}")
    for hidden in args.hidden or ([64] if small else [896, 4096]):
        inputs = make_inputs(args.device, tokens, vocab, hidden, args.temperature)
        for backward in (False, True):
            torchs = 0.0
            for method_name, method in METHODS.items():
                call = functools.partial(inputs.run, method, backward)
                taken = seconds(args.device, call, args.repeats or (2 if small else 10))
                torchs = torchs or taken
                extra = peak_extra_bytes(args.device, call)
                what = "forward+backward" if backward else "forward"
                print(
                    f"{hidden:>7}  {what:<16} {method_name:<12} {taken * 1e3:>9.2f}"
                    f"  {taken / torchs:>8.2f}  {extra / 2**20:>10,.0f}  {extra / whole:>9.3f}"
                )
        one, other = (inputs.run(method, False) for method in METHODS.values())
        print(f"{hidden:>7}  mean difference of a log-probability: {float((one - other).abs().mean()):.1e}")


if __name__ == "__main__":
    main()
