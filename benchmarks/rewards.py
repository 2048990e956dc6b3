"""Reward processes among samples that hang, crash or eat memory. Prints one table, and fails where a promise is broken.

    python -m benchmarks.rewards                       # 1,000 samples of 40 ms, two processes, time limit 5 s
    python -m benchmarks.rewards --samples 200 --work-ms 10 --timeout-s 2

The clean run scores samples that each keep a core busy for work-ms. In the other, 1 % hang (half of them in a loop,
half asleep), 1 % crash the interpreter and 1 % ask for 4 GB under a limit of 2 GB; they lie at random places. Promises:
the second run takes at most 1.3 times the first and one time limit; those samples are marked as failed and no other is;
no process is left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.processes import marked

REWARD = """
import os
import time


def behave(solution_str, work_s):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(3600)
    if solution_str == "crash":
        os.kill(os.getpid(), 11)
    if solution_str == "memory":
        return len(bytearray(4 << 30))
    end = time.process_time() + work_s
    while time.process_time() < end:
        pass
    return float(solution_str)
"""
FACTOR = 1.3


def texts(count: int, bad: bool, generator: random.Random) -> list[str]:
    """What each sample does: its number is its score; a hundredth each of the kinds that go wrong."""
    found = [str(number) for number in range(count)]
    if bad:
        each = count // 100
        kinds = ["loop"] * (each // 2) + ["sleep"] * (each - each // 2) + ["crash"] * each + ["memory"] * each
        for place, kind in zip(generator.sample(range(count), len(kinds)), kinds, strict=True):
            found[place] = kind
    return found


def timed(pool: RewardPool, solutions: list[str]) -> tuple[float, list[RewardResult | None]]:
    """Seconds of one call, and its results."""
    batch = [RewardSample("bench", "", text, "") for text in solutions]
    start = time.perf_counter()
    results = pool.score(batch)
    return time.perf_counter() - start, results


def wrong(solutions: list[str], results: list[RewardResult | None]) -> list[int]:
    """Places whose result is not what the sample does: a failure where it goes wrong, its number elsewhere."""
    found: list[int] = []
    for place, (text, result) in enumerate(zip(solutions, results, strict=True)):
        right = result is not None and (
            result.value == float(text) and result.failed is None if text.isdigit() else result.failed is not None
        )
        if not right:
            found.append(place)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward processes among samples that hang, crash or eat memory")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--work-ms", type=float, default=40.0)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "behave.py")
        file.write_text(REWARD)
        options = {"num_workers": args.workers, "timeout_s": args.timeout_s, "memory_limit": 2 << 30}
        kwargs = {"work_s": args.work_ms / 1e3}
        print(f"{args.samples} samples of {args.work_ms:g} ms, {args.workers} processes on {os.cpu_count()} cores")
        for repeat in range(args.repeats):
            generator = random.Random(repeat)
            with RewardPool(f"{file}:behave", kwargs, **options) as pool:
                timed(pool, ["0"])
                clean_s, clean = timed(pool, texts(args.samples, False, generator))
                solutions = texts(args.samples, True, generator)
                bad_s, bad = timed(pool, solutions)
                mark = pool.mark
            left = marked(mark)
            allowed_s = FACTOR * clean_s + args.timeout_s
            kinds = Counter(text for text in solutions if not text.isdigit())
            misplaced = len(wrong([str(n) for n in range(args.samples)], clean)) + len(wrong(solutions, bad))
            print(f"clean {clean_s:.2f} s   with {dict(kinds)} {bad_s:.2f} s   allowed {allowed_s:.2f} s")
            print(f"results that are not what they should be: {misplaced}   processes left behind: {len(left)}")
            assert not misplaced and not left and bad_s <= allowed_s


if __name__ == "__main__":
    main()
