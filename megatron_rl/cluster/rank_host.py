"""What runs inside each Ray actor: it prepares the process, builds the worker and passes calls on.

This module imports nothing heavy, so that environment variables are in place before torch and vLLM read them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.backend import Answer, close_worker, timed_call
from megatron_rl.cluster.dispatch import Call
from megatron_rl.cluster.environment import accept_read_only_tensors, held_port
from megatron_rl.errors import ClusterError

STACK_FRAMES = 12
"""Innermost frames of a late rank that the controller's error shows."""

Watch = tuple[str, float]
"""(key, seconds): where a call that takes longer than the seconds leaves its stack."""


@dataclass(frozen=True)
class RankLocation:
    """The node and process that an actor runs in."""

    node_id: str
    ip: str
    pid: int
    gpu_index: int
    """Index of the actor's GPU among those this process sees; -1 on CPU."""
    port: int
    """A TCP port of the node that the rank keeps for torch's store until its worker is built."""


class RankHost:
    """One rank. Ray runs its methods one after the other in the process's main thread."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._held = held_port()

    def place(self) -> RankLocation:
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        # Ray is told to leave CUDA_VISIBLE_DEVICES alone, so a GPU's index is its position in the node's own
        # list.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = -1
        if gpus:
            index = visible.split(",").index(str(gpus[0])) if visible else int(gpus[0])
        port = self._held.getsockname()[1]
        return RankLocation(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), index, port)

    def prepare(self, environment: Mapping[str, str], folder: str) -> None:
        """Set the rank's variables and go to the controller's working folder, so that relative paths mean the same."""
        os.environ.update(environment)
        accept_read_only_tensors()
        # A terminal's Ctrl-C reaches every process; it is the controller that ends the ranks, once they have saved.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not Path(folder).is_dir():
            raise ClusterError(
                f"the controller's folder {folder} does not exist on node {os.uname().nodename} "
                "-- start the run in a folder that all nodes share"
            )
        os.chdir(folder)

    def start(self, watch: Watch, worker_cls: type, rank: int, world: int, args: Sequence[Any]) -> None:
        with _watched(watch):
            self._worker = worker_cls(rank, world, *args)
        self._held.close()

    def call(self, watch: Watch, method: str, call: Call, keep: bool) -> Answer:
        with _watched(watch):
            return timed_call(self._worker, method, call, keep)

    def close(self) -> None:
        worker, self._worker = self._worker, None
        close_worker(worker)


@contextmanager
def _watched(watch: Watch) -> Iterator[None]:
    """Keep this thread's stack once watch.after_s have passed; from a thread of its own, since this one may hang."""
    key, after_s = watch
    timer = threading.Timer(after_s, _keep_stack, (key, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _keep_stack(key: str, thread: int) -> None:
    frame = sys._current_frames().get(thread)
    if frame is not None:
        frames = traceback.extract_stack(frame)[-STACK_FRAMES:]
        ray_runtime.store_stack(key, "".join(traceback.format_list(frames)))
