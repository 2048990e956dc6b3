"""What runs inside each Ray actor: it prepares the process, builds the worker and passes calls on.

This module imports nothing heavy, so that environment variables are in place before torch and vLLM read them.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.backend import Answer, close_worker, timed_call
from megatron_rl.cluster.caches import compile_caches
from megatron_rl.cluster.dispatch import Call
from megatron_rl.cluster.environment import accept_read_only_tensors, held_port
from megatron_rl.cluster.rank_errors import named_error
from megatron_rl.cluster.watch import Watch, Watchdog
from megatron_rl.cluster.watch_probe import oom_file, oom_kills
from megatron_rl.errors import ClusterError
from megatron_rl.observe.garbage import leave_out_what_is_there

_LOOK_S = 1.0


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
    host: str
    """The node's name."""
    log: str
    """The file that the process's standard error goes to; "" if it is none."""
    oom_file: str
    """See watch_probe.oom_file."""


class RankHost:
    """One rank. Ray runs its methods one after the other in the process's main thread."""

    def __init__(self) -> None:
        # Until `start`, whose arguments bring torch's modules with them: see observe.garbage.no_collections.
        gc.disable()
        self._worker: Any = None
        self._held = held_port()
        self._watchdog: Watchdog | None = None
        self._rank = -1
        threading.Thread(target=_end_with, args=(os.getppid(),), name="raylet", daemon=True).start()

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
        return RankLocation(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            index,
            port,
            host=os.uname().nodename,
            log=_own_log(),
            oom_file=oom_file(),
        )

    def prepare(self, environment: Mapping[str, str], folder: str | None, cache_dir: str | None) -> None:
        """Set the rank's variables and go to the controller's working folder, so that relative paths mean the same.

        folder: None if Ray has given every process its own copy of that folder. cache_dir: cluster.cache_dir.
        """
        os.environ.update(environment)
        # On the node itself: homes of users may differ from node to node.
        os.environ.update(compile_caches(cache_dir, os.environ, folder))
        accept_read_only_tensors()
        # A terminal's Ctrl-C reaches every process; it is the controller that ends the ranks, once they have saved.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if folder is None:
            return
        if not Path(folder).is_dir():
            raise ClusterError(
                f"the controller's folder {folder} does not exist on node {os.uname().nodename} "
                "-- start the run in a folder that all nodes share"
            )
        os.chdir(folder)

    def examine(self, function: Callable[..., object], args: Sequence[object]) -> object:
        """What the function returns on this rank, which has no worker yet."""
        return function(*args)

    def start(self, watch: Watch, key: str, worker_cls: type, rank: int, world: int, args: Sequence[Any]) -> None:
        """Build the worker. key: where Signs are kept for the controller."""
        gc.enable()
        self._rank, file = rank, oom_file()
        self._watchdog = Watchdog(lambda text: ray_runtime.keep(key, text), lambda: oom_kills(file))
        with self._watchdog.watching(watch, "__init__"):
            try:
                self._worker = worker_cls(rank, world, *args)
            except BaseException as error:
                raise named_error(error, rank, "__init__") from error
        self._held.close()
        leave_out_what_is_there()

    def call(self, watch: Watch, method: str, call: Call, keep: bool) -> Answer:
        assert self._watchdog is not None, "a call before the start"
        with self._watchdog.watching(watch, method):
            try:
                return timed_call(self._worker, method, call, keep)
            except BaseException as error:
                raise named_error(error, self._rank, method) from error

    def close(self) -> None:
        worker, self._worker = self._worker, None
        close_worker(worker)


def _end_with(raylet: int) -> None:
    """End this process once its raylet, whose child it is, has gone. Ray asks it to end, which a main thread that waits
    in a collective never hears; with the raylet the controller has lost the rank.
    """
    while os.getppid() == raylet:
        time.sleep(_LOOK_S)
    os._exit(1)


def _own_log() -> str:
    try:
        file = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return file if file.startswith("/") and os.path.isfile(file) else ""
