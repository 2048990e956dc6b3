"""Packed sequences against padded ones, and the balance and speed of batch planning. Prints three tables.

    python -m benchmarks.packing                   # a small model on the CPU, float32
    python -m benchmarks.packing --device cuda     # Qwen2 0.5B's shape, bfloat16
    python -m benchmarks.packing --plans-only      # no model

Lengths are log-normal (median 400 tokens, sigma 1), cut at 8,192: the long tail of sampled responses; the CPU's model
sees them divided by 8. All three ways train on the same sequences with the same token budget of a micro-batch:

    packed          end to end, no padding (what training does)
    padded, sorted  each padded to its micro-batch's longest, sequences of like length together
    padded          the same with sequences as they come

Tokens a second count real tokens. Balance is the cost of the busiest of 8 ranks over the mean; aim: at most 1.02.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence

import torch

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.data.batching import BatchPlan, plan_batches, sequence_cost
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import num_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.types import TrainBatch

LONGEST = 8192
MEDIAN_LOG, SIGMA = 6.0, 1.0
_COMMON = {
    "architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "initializer_range": 0.02, "head_dim": 64,
}  # fmt: skip
SHAPES = {
    "cpu": {
        "num_layers": 4, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 768, "vocab_size": 4096,
    },
    "cuda": {
        "num_layers": 24, "hidden_size": 896, "num_heads": 14, "num_kv_heads": 2, "ffn_size": 4864,
        "vocab_size": 151936,
    },
}  # fmt: skip


def draw_lengths(generator: random.Random, count: int, divisor: int = 1) -> list[int]:
    """Token counts of `count` sequences."""
    draws = (int(generator.lognormvariate(MEDIAN_LOG, SIGMA)) for _ in range(count))
    return [max(16, min(LONGEST, length)) // divisor for length in draws]


def in_order(lens: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches cut from `order` where the next sequence's padding would pass the budget."""
    micros: list[list[int]] = []
    longest = 0
    for s in order:
        longest = max(longest, lens[s])
        if not micros or (len(micros[-1]) + 1) * longest > max_tokens:
            micros.append([])
            longest = lens[s]
        micros[-1].append(s)
    return micros


def make_batch(lens: Sequence[int], vocab: int) -> TrainBatch:
    """Random tokens, all but the first of each sequence trained on."""
    total = sum(lens)
    mask = torch.ones(total, dtype=torch.bool)
    mask[torch.cumsum(torch.tensor(lens), 0) - torch.tensor(lens)] = False
    tokens = torch.randint(0, vocab, (total,), generator=torch.Generator().manual_seed(0))
    return TrainBatch(tokens, tuple(lens), mask, {"loss_weights": mask.float() / mask.sum()})


def throughput(device: str, count: int, max_tokens: int, repeats: int) -> None:
    """Table of tokens a second."""
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import build, convert
    from megatron_rl.parallel import groups
    from megatron_rl.parallel.topology import Topology
    from megatron_rl.weights.safetensors import RandomSource

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    groups.init_process_group(0, 1, device)
    groups.init_model_parallel(Topology(1))
    shape = ModelShape(**_COMMON, **SHAPES[device])  # type: ignore[arg-type]
    dtype = "bfloat16" if device == "cuda" else "float32"
    lens = draw_lengths(random.Random(1), count, 1 if device == "cuda" else 8)
    batch = make_batch(lens, shape.vocab_size)
    plan = plan_batches(lens, [0] * count, dp=1, max_tokens=max_tokens).minis[0][0]
    by_length = sorted(range(count), key=lambda s: -lens[s])
    ways = {
        "packed": (True, plan),
        "padded, sorted": (False, in_order(lens, by_length, max_tokens)),
        "padded": (False, in_order(lens, range(count), max_tokens)),
    }
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    size = num_parameters(shape, FAMILIES[shape.architecture]) / 1e6
    print(f"{name}, {dtype}, {size:.0f} M parameters, {count} sequences of {min(lens)} to")
    print(f"{max(lens)} tokens (median {statistics.median(lens):.0f}), at most {max_tokens} tokens a micro-batch")
    print(
        f"{'':<16}{'micro-batches':>14}{'real tokens':>13}{'computed':>12}{'s a step':>10}{'tokens/s':>11}{'loss':>10}"
    )
    for way, (packing, micros) in ways.items():
        actor = ActorConfig(packing=packing)
        policy = build.build_model(shape, actor, dtype, torch.device(device))
        convert.load_hf(policy, lambda: RandomSource(1, shape.initializer_range))
        trainable = build.make_trainable(policy, actor.optim, 100)
        taken, loss = step_seconds(trainable, [batch.select(micro) for micro in micros], repeats)
        computed = sum(_computed([lens[s] for s in micro], packing) for micro in micros)
        print(
            f"{way:<16}{len(micros):>14}{sum(lens):>13,}{computed:>12,}{taken:>10.3f}{sum(lens) / taken:>11,.0f}"
            f"{loss:>10.5f}"
        )
        del policy, trainable


def _computed(lens: Sequence[int], packing: bool) -> int:
    return sum(lens) if packing else len(lens) * max(lens)


def step_seconds(trainable, micros: list[TrainBatch], repeats: int) -> tuple[float, float]:
    """Median seconds of an optimizer step after one that warms up, and the first step's loss."""
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore.objectives import token_objective
    from megatron_rl.mcore.step import optimizer_step

    objective = token_objective(trainable.model, nll_loss, 1.0)
    taken, losses = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        report, _ = optimizer_step(trainable, micros, objective)
        taken.append(time.perf_counter() - start)
        losses.append(report.loss)
    return statistics.median(taken[1:]), losses[0]


def imbalance(lens: Sequence[int], plan: BatchPlan) -> float:
    """Cost of the busiest rank over the mean, of the plan's only mini-batch."""
    (ranks,) = plan.minis
    loads = [sum(sequence_cost(lens[s]) for micro in rank for s in micro) for rank in ranks]
    return max(loads) * len(loads) / sum(loads)


def balance(batches: int, ranks: int = 8) -> None:
    """Table of balance over random batches. No plan can be better than the longest sequence over the mean."""
    print(f"{'sequences':>10}{'ranks':>7}{'batches':>9}{'mean max/mean':>15}{'worst':>9}{'at best':>9}")
    for count in (128, 256, 512, 1024):
        generator = random.Random(count)
        found = []
        for _ in range(batches // 4):
            lens = draw_lengths(generator, count)
            costs = [sequence_cost(length) for length in lens]
            at_best = max(1.0, max(costs) * ranks / sum(costs))
            plan = plan_batches(lens, [0] * count, dp=ranks, max_tokens=2 * LONGEST)
            found.append((imbalance(lens, plan), at_best))
        mean, (worst, at_best) = statistics.mean(ratio for ratio, _ in found), max(found)
        print(f"{count:>10}{ranks:>7}{len(found):>9}{mean:>15.5f}{worst:>9.5f}{at_best:>9.5f}")


def plan_time() -> None:
    """Table of planning time."""
    print(f"{'samples':>10}{'ranks':>7}{'plan s':>9}{'max/mean':>10}{'micro-batches':>15}")
    for count, ranks in ((1_000, 8), (10_000, 64), (100_000, 1_024)):
        lens = draw_lengths(random.Random(2), count)
        start = time.perf_counter()
        plan = plan_batches(lens, [0] * count, dp=ranks, max_tokens=2 * LONGEST)
        taken = time.perf_counter() - start
        print(f"{count:>10,}{ranks:>7,}{taken:>9.2f}{imbalance(lens, plan):>10.5f}{len(plan.minis[0][0]):>15}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--plans-only", action="store_true")
    args = parser.parse_args()
    small = args.device == "cpu"
    if not args.plans_only:
        throughput(
            args.device,
            args.sequences or (64 if small else 128),
            args.max_tokens or (2048 if small else 16384),
            args.repeats,
        )
        print()
    balance(args.batches)
    print()
    plan_time()


if __name__ == "__main__":
    main()
