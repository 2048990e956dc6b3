"""One rank in this process: for a debugger, and for machines without Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_rl.cluster import stop
from megatron_rl.cluster.backend import Answer, close_worker, timed_call
from megatron_rl.cluster.caches import compile_caches
from megatron_rl.cluster.dispatch import Call
from megatron_rl.cluster.environment import free_port, rank_environment, worker_environment
from megatron_rl.cluster.resources import Device
from megatron_rl.config.sections.cluster import ClusterConfig


class InlineBackend:
    """The worker is an object here; a call runs in the caller's thread and has no deadline (a debugger may
    stop in it).
    """

    world = 1

    def __init__(self, worker_cls: type, worker_args: Sequence[Any], cluster: ClusterConfig, device: Device) -> None:
        """Set the rank's environment variables, which `close` takes back, and build worker_cls(0, 1, *worker_args)."""
        own = worker_environment(cluster, device, os.environ)
        own |= rank_environment(0, 1, 0, 1, "127.0.0.1", free_port())
        own |= compile_caches(cluster.cache_dir, os.environ)
        self._before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        self._worker: Any = None
        try:
            with stop.handlers_kept():
                self._worker = worker_cls(0, 1, *worker_args)
        except BaseException:
            self._restore()
            raise

    def call(
        self, method: str, calls: Sequence[Call | None], keep: Sequence[bool], timeout_s: float
    ) -> list[Answer | None]:
        """See Backend.call; errors are raised where they happen and timeout_s is not looked at."""
        (call,) = calls
        if call is None:
            return [None]
        try:
            # Half a call would leave the worker, which is needed for the save, in an unknown state.
            with stop.held():
                return [timed_call(self._worker, method, call, keep[0])]
        except BaseException as error:
            error.add_note(f"on rank 0 in {type(self._worker).__name__}.{method}")
            raise

    def close(self, graceful: bool) -> None:
        """Close the worker and take the environment variables back."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if graceful:
                close_worker(worker)
        finally:
            self._restore()

    def _restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
