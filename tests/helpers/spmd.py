"""A run without a controller, for run_ranks: every rank runs it, and all of them answer a call of workers' methods."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.cluster.backend import timed_call
from megatron_rl.cluster.worker_group import WorkerGroup


class SpmdBackend:
    """Calls this rank's worker with its own entry, and shares the answers."""

    def __init__(self, rank: int, world: int, worker: Any) -> None:
        self.rank, self.world, self.worker = rank, world, worker

    def call(self, method: str, calls: Any, keep: Any, timeout_s: float) -> list[Any]:
        answer = timed_call(self.worker, method, calls[self.rank], keep[self.rank])
        answers: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(answers, answer)
        return answers

    def close(self, graceful: bool) -> None:
        self.worker.close()


def start_here(rank: int, world: int) -> list[Any]:
    """Have runs of this process start their workers as this rank. Returns a list that gets each worker."""
    from megatron_rl.trainers import placement

    workers: list[Any] = []

    def start_group(worker_cls: Any, args: Any, cluster: Any, grid: Any, device: str, check: Any) -> WorkerGroup:
        workers.append(worker_cls(rank, world, *args))
        return WorkerGroup(worker_cls, SpmdBackend(rank, world, workers[-1]), grid, 60.0)

    placement.start_group = start_group  # type: ignore[assignment]
    return workers
