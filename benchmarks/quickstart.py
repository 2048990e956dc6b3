"""Measure the quick start: seconds, greedy held-out accuracy, peak memory, controller overhead, one row a seed.

    python benchmarks/quickstart.py [--seeds 0 1 2]

Runs launch/quickstart.sh --fresh for each seed in this checkout (the install must be done: its time is not counted).
Memory is the proportional set size (shared pages counted once) of all processes that descend from the script, sampled
four times a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
RUNS = REPO / "runs" / "quickstart"


def _tree_bytes(root: psutil.Process, daemons: set[int]) -> int:
    """PSS of the tree below `root`, and of Ray's daemons, which leave the tree but keep its session's name."""
    total = 0
    processes = [root, *root.children(recursive=True)]
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if process.info["pid"] not in daemons and (
            "raylet" in command or "gcs_server" in command or "ray::" in command
        ):
            processes.append(process)
    for process in {process.pid: process for process in processes}.values():
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended between the two looks
    return total


def measure(seed: int) -> dict[str, float]:
    """One quick start; raises CalledProcessError where it fails."""
    before = {process.pid for process in psutil.process_iter()}
    start = time.perf_counter()
    command = ["bash", str(REPO / "launch" / "quickstart.sh"), "--fresh", f"trainer.seed={seed}"]
    child = subprocess.Popen(command, cwd=REPO)
    root, peak = psutil.Process(child.pid), 0
    while child.poll() is None:
        try:
            peak = max(peak, _tree_bytes(root, before))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.25)
    if child.wait() != 0:
        raise subprocess.CalledProcessError(child.returncode, command)
    seconds = time.perf_counter() - start
    rows = {
        run: [json.loads(line) for line in (RUNS / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("sft", "grpo")
    }
    accuracy = [row["val/accuracy"] for row in rows["grpo"] if "val/accuracy" in row]
    steps = [row for row in rows["grpo"] if "perf/controller_s" in row]
    return {
        "seed": seed,
        "seconds": seconds,
        "sft_steps": rows["sft"][-1]["step"],
        "before": accuracy[0],
        "after": accuracy[-1],
        "peak_gib": peak / 2**30,
        "step_s": statistics.median(row["time/step"] for row in steps),
        "controller_s": statistics.median(row["perf/controller_s"] for row in steps),
        "controller_max_s": max(row["perf/controller_s"] for row in steps),
        "tokens_per_s": statistics.median(row["perf/tokens_per_s"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    results = [measure(seed) for seed in parser.parse_args().seeds]
    print("".join(f"{name:>18}" for name in results[0]))
    for result in results:
        print("".join(f"{value:>18.3f}" if isinstance(value, float) else f"{value:>18}" for value in result.values()))


if __name__ == "__main__":
    main()
