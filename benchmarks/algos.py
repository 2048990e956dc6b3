"""How long the controller takes between rewards and update, and what a loop over tokens would take instead.

    python -m benchmarks.algos                     advantages and losses on 1,024 sequences of 4,096 tokens
    python -m benchmarks.algos --samples-only      the controller's work of a step for 1k, 10k and 100k samples

The loop is Python over one token at a time, in the same arithmetic. It is run on the first sequences and multiplied up
to the whole batch (it is linear in tokens); the table says on how many tokens. Times are CPU seconds of one thread, so
that other work on the machine does not show; medians after a first call, the loop once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from megatron_rl.algos.correction import correct_rollouts
from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.estimators.base import ScoredSequences, SequenceEstimator, TokenEstimator
from megatron_rl.algos.estimators.grpo import Grpo
from megatron_rl.algos.estimators.tokens import CreditTokens
from megatron_rl.algos.gae import gae
from megatron_rl.algos.groups import sequence_sums, spread
from megatron_rl.algos.losses import LOSSES
from megatron_rl.algos.losses.base import LossTokens
from megatron_rl.algos.token_losses import sequence_means_of
from megatron_rl.cluster.handles import hand_over
from megatron_rl.data.batching import plan_batches
from megatron_rl.types import EngineAnswer, Prompt, Rollouts, Samples, Texts
from megatron_rl.workers.rank_batch import RankBatch

GROUP = 8


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


class Batch:
    """S sequences of L trained tokens in groups of 8, with random columns."""

    def __init__(self, sequences: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        total = sequences * length
        self.sequences, self.length, self.total = sequences, length, total
        self.mask = torch.ones(total, dtype=torch.bool)
        self.segments = torch.arange(sequences).repeat_interleave(length)
        self.groups = torch.arange(sequences) // GROUP
        self.rewards = torch.zeros(total)
        self.rewards[length - 1 :: length] = torch.randint(0, 2, (sequences,), generator=generator).float()
        self.values = torch.rand(total, generator=generator)
        self.old = -torch.rand(total, generator=generator)
        self.new = self.old + 0.1 * torch.randn(total, generator=generator)
        self.columns = {"segment_ids": self.segments, "sequence_lens": torch.full((sequences,), length)}

    def credit(self, name: str) -> None:
        """Advantages of all tokens, by an estimator."""
        greedy = torch.zeros(self.sequences // GROUP)
        estimator = ESTIMATORS[name]()
        if isinstance(estimator, SequenceEstimator):
            returns, lens = (sequence_sums(one, self.segments, self.sequences) for one in (self.rewards, self.mask))
            spread(estimator(ScoredSequences(returns, self.groups, lens)), self.mask, self.segments)
            return
        assert isinstance(estimator, TokenEstimator)
        tokens = CreditTokens(
            self.rewards,
            self.mask,
            self.segments,
            self.sequences,
            greedy_scores=None if greedy is None else greedy[self.groups],
            values=self.values,
        )
        estimator(tokens)

    def loss(self, name: str, advantages: torch.Tensor) -> None:
        """Loss and gradient of all tokens."""
        new = self.new.clone().requires_grad_()
        means = sequence_means_of(self.columns, lambda sums: sums)
        losses, _ = LOSSES[name]()(LossTokens(new, self.old, advantages, means))
        losses.mean().backward()


def loop_grpo(batch: Batch, sequences: int) -> None:
    """GRPO's advantages, one token at a time."""
    rewards, length = batch.rewards.tolist(), batch.length
    returns = [math.fsum(rewards[s * length : (s + 1) * length]) for s in range(sequences)]
    for s in range(sequences):
        group = returns[s // GROUP * GROUP : s // GROUP * GROUP + GROUP]
        advantage = (returns[s] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
        _ = [advantage for _ in range(length)]


def loop_gae(batch: Batch, sequences: int) -> None:
    """GAE, one token at a time, from the last."""
    rewards, values, length = batch.rewards.tolist(), batch.values.tolist(), batch.length
    found = [0.0] * (sequences * length)
    for s in range(sequences):
        after = carried = 0.0
        for t in range((s + 1) * length - 1, s * length - 1, -1):
            carried = rewards[t] + after - values[t] + 0.95 * carried
            after = values[t]
            found[t] = carried


def loop_ppo_clip(batch: Batch, sequences: int) -> None:
    """PPO's loss and its derivative, one token at a time."""
    new, old, total = batch.new.tolist(), batch.old.tolist(), sequences * batch.length
    loss, slopes = 0.0, [0.0] * total
    for t in range(total):
        ratio, advantage = math.exp(new[t] - old[t]), 1.0 if t % 3 else -1.0
        free, clipped = ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage
        surrogate = min(free, clipped)
        if advantage < 0:
            surrogate = max(surrogate, 3.0 * advantage)
        loss -= surrogate
        slopes[t] = -free if surrogate == free else 0.0


def against_a_loop(sequences: int, length: int, looped: int, repeats: int) -> None:
    """Table of advantages and losses against the loops."""
    batch = Batch(sequences, length)
    print(f"{sequences:,} x {length:,} tokens; loops on {looped * length:,} tokens,")
    print(f"multiplied by {sequences // looped}")
    print(f"{'':<42}{'s':>9}{'loop s':>10}{'times':>8}")
    flat = torch.where(torch.arange(batch.total) % 3 > 0, 1.0, -1.0)
    whole: dict[str, tuple[Callable[[], object], Callable[[Batch, int], None] | None]] = {
        "advantages grpo": (lambda: batch.credit("grpo"), loop_grpo),
        "advantages gae": (
            lambda: gae(batch.rewards, batch.values, batch.mask, batch.segments, gamma=1.0, lam=0.95), loop_gae,
        ),
        "loss and gradient ppo_clip": (lambda: batch.loss("ppo_clip", flat), loop_ppo_clip),
    }  # fmt: skip
    whole |= {
        f"advantages {name}": (lambda name=name: batch.credit(name), None)
        for name in ESTIMATORS if name not in ("grpo", "gae")
    }  # fmt: skip
    whole |= {
        f"loss and gradient {name}": (lambda name=name: batch.loss(name, flat), None)
        for name in LOSSES if name != "ppo_clip"
    }  # fmt: skip
    whole["rollout correction (icepop, geometric, veto)"] = (lambda: _correct(batch), None)
    total = [0.0, 0.0]
    for name, (work, loop) in whole.items():
        work()
        taken = seconds_of(work, repeats)
        if loop is None:
            print(f"{name:<46}{taken:>5.3f}")
            continue
        looping = seconds_of(lambda loop=loop: loop(batch, looped), 1) * sequences / looped
        print(f"{name:<42}{taken:>9.3f}{looping:>10.1f}{looping / taken:>8.0f}")
        if name != "advantages gae":
            total = [total[0] + taken, total[1] + looping]
    print(f"{'grpo and ppo_clip together':<42}{total[0]:>9.3f}{total[1]:>10.1f}{total[1] / total[0]:>8.0f}")


def _correct(batch: Batch) -> None:
    correct_rollouts(
        batch.new, batch.old, batch.mask, batch.segments, batch.sequences, weights="icepop", weight_high=5.0,
        weight_low=0.5, reject="geometric", reject_high=2.0, reject_low=0.5, veto_below=1e-4,
    )  # fmt: skip


def samples_of(count: int, mean_length: int) -> Rollouts:
    """`count` responses of random lengths to prompts of 16 tokens, from one engine."""
    lens = np.random.default_rng(count).integers(1, 2 * mean_length, count, endpoint=True).astype(np.int32)
    total, zeros = int(lens.sum()), np.zeros(count, np.int32)
    finish = zeros.astype(np.uint8)
    samples = Samples(np.full(total, 7, np.int32), np.full(total, -1.0, np.float32), lens, finish, zeros, zeros)
    answer = EngineAnswer(lens, finish, zeros, zeros, hand_over(samples), hand_over(Texts.of([""] * count)))
    prompts = [Prompt(g, (5,) * 16, "", "", None) for g in range(count // GROUP)]
    return Rollouts.from_answers(prompts, GROUP, [answer])


def controller(counts: list[int], mean_length: int) -> None:
    """Table of the controller's work of one GRPO step, dp 8, between engine and update, and of one of its ranks."""
    print(f"responses of {mean_length} tokens on average, dp 8; seconds")
    print(f"{'samples':>9}{'tokens':>13}{'plan':>8}{'refs':>8}{'advantages':>12}{'us/sample':>11}{'a rank loads':>14}")
    for count in counts:
        rollouts = samples_of(count, mean_length)
        seq_lens, ids = rollouts.seq_lens.tolist(), torch.from_numpy(rollouts.group_ids.astype(np.int64))
        times = [time.process_time()]
        plan = plan_batches(seq_lens, [0] * count, dp=8, max_tokens=16384)
        times.append(time.process_time())
        refs = [rollouts.refs(sorted(s for micro in micros for s in micro)) for micros in plan.passes()]
        times.append(time.process_time())
        returns = torch.randint(0, 2, (count,)).double()
        Grpo()(ScoredSequences(returns, ids, torch.from_numpy(rollouts.lens)))
        times.append(time.process_time())
        RankBatch.load(refs[0])
        times.append(time.process_time())
        *parts, load = [end - start for start, end in pairwise(times)]
        print(f"{count:>9,}{sum(seq_lens):>13,}" + "".join(
            f"{part:>{width}.3f}" for part, width in zip(parts, (8, 8, 12), strict=True)
        ) + f"{sum(parts) / count * 1e6:>11.0f}{load:>14.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--looped", type=int, default=16, help="sequences that the loops run over")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mean-length", type=int, default=256, help="tokens of a response in the second table")
    parser.add_argument("--samples-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.samples_only:
        against_a_loop(args.sequences, args.length, args.looped, args.repeats)
        print()
    controller([1_000, 1_000, 10_000, 100_000], args.mean_length)


if __name__ == "__main__":
    main()
