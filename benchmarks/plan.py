"""What one rank does to get ready for weight syncs: CPU seconds, and memory above the start. No GPU, one process.

    python -m benchmarks.plan                                                # the two sizes below
    python -m benchmarks.plan llama3.1/70b train.tp=8 train.pp=4 rollout.tp=8 gpus=1024     # keys of `megatron-rl plan`
    python -m benchmarks.plan --rank 77

It does what a worker does at its start (workers/colocated.py): the shards of both sides, what it can share, the plan
with its proof and its digest, this rank's moves, and their rounds. Peak is the largest resident memory; each size has a
process of its own, and memory counts from the end of its imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.reshard.alias import find_sharing
from megatron_rl.reshard.execute import Transfer
from megatron_rl.reshard.plan import make_plan
from megatron_rl.reshard.planning.request import SyncRequest, parse, request
from megatron_rl.reshard.rank_order import colocated_layout
from megatron_rl.reshard.shards import engine_shards, trainer_shards

SIZES = {
    "qwen3/30b-a3b": ("train.ep=8", "rollout.tp=2", "gpus=128"),
    "qwen3/235b-a22b": (
        "train.tp=4",
        "train.pp=8",
        "train.ep=16",
        "train.num_layers_in_first_pipeline_stage=11",
        "train.num_layers_in_last_pipeline_stage=11",
        "rollout.tp=8",
        "gpus=1024",
    ),
}
BUCKET_MB = 256


def get_ready(asked: SyncRequest, rank: int) -> Transfer:
    """The transfer of one rank of colocated engines."""
    table, topology = asked.table, asked.trainers.topology
    layout = colocated_layout(
        table, asked.trainers, tp=asked.tp, ep=asked.ep, gpus_per_node=asked.gpus_per_node, ascending=asked.ascending
    )
    trainers = trainer_shards(table.shape, table.family, topology, asked.trainers.stages)
    engines = engine_shards(table.shape, table.family, layout)
    mine = next(shard for shard in engines if shard.rank == rank)
    find_sharing(mine.params, trainers[rank].params)
    plan = make_plan(trainers, engines, node_of=lambda one: one // asked.gpus_per_node)
    # All that is asked of a group before the first sync.
    group: Any = SimpleNamespace(rank=rank, world=topology.world)
    return Transfer(
        plan,
        group,
        trainers[rank].params,
        mine.params,
        trainer_dtype=torch.bfloat16,
        engine_dtype=torch.bfloat16,
        cap_bytes=BUCKET_MB << 20,
    )


def measure(model: str, settings: Sequence[str], rank: int) -> str:
    """A row of the table."""
    asked = request(model, parse(settings))
    before, start = _resident_mb(), time.process_time()
    transfer = get_ready(asked, rank)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    plan = transfer.plan
    part = plan.of_rank(rank)
    everyone = sum(len(one.moves) * one.count for one in plan.solved)
    peers = len({one.peer for one in transfer.rounds})
    return (
        f"| {model} | {asked.world} | {everyone:,} | {len(part.local):,} | {len(part.sends) + len(part.receives):,} "
        f"| {peers} | {len(transfer.rounds)} | {seconds:.1f} | {peak:.0f} |"
    )


def _resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as `megatron-rl plan --model` takes it")
    parser.add_argument("settings", nargs="*", help="keys of `megatron-rl plan`")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    sizes = {args.model: tuple(args.settings)} if args.model else SIZES
    print("| model | GPUs | moves of all ranks | local moves | sends, receives | peers | rounds | CPU s | MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, settings in sizes.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(measure, (model, settings, args.rank)), flush=True)


if __name__ == "__main__":
    main()
