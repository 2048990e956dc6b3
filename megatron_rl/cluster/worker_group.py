"""N workers as one object."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from megatron_rl.cluster.backend import Backend
from megatron_rl.cluster.dispatch import RankGrid, collected_ranks, dispatch_of, gather, scatter
from megatron_rl.cluster.resources import Device
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError


class WorkerGroup:
    """Calls a method on its ranks as the method declares, and waits:
    `group.update(batch)`, `group.call("update", batch)`.

    Calls from several threads run one after the other. A worker's error is raised as itself, with its rank in
    a note; ClusterError names ranks that are dead or do not answer within the deadline, after which the group
    is of no more use.
    """

    def __init__(self, worker_cls: type, backend: Backend, grid: RankGrid, timeout_s: float) -> None:
        """timeout_s: longest wait for one call."""
        self._worker_cls = worker_cls
        self._backend = backend
        self._grid = grid
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self.last_seconds: dict[str, float] = {}
        """method -> seconds of its last call as the caller saw them."""
        self.last_worker_seconds: dict[str, tuple[float, ...]] = {}
        """method -> seconds inside the method on each rank that was called, in the last call."""
        self.busy_seconds = 0.0
        """Sum over all calls of the slowest rank's seconds: what the controller could not have saved."""

    @property
    def grid(self) -> RankGrid:
        return self._grid

    @property
    def backend(self) -> Backend:
        return self._backend

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a declared method. What comes back is what its `collect` says."""
        mode = dispatch_of(self._worker_cls, method)
        try:
            calls = scatter(mode, args, kwargs, self._grid)
        except ClusterError as error:
            error.add_note(f"in {self._worker_cls.__name__}.{method}")
            raise
        wanted = collected_ranks(mode, self._grid)
        with self._lock:
            start = time.perf_counter()
            answers = self._backend.call(
                method, calls, [rank in wanted for rank in range(self._grid.world)], self._timeout_s
            )
            self.last_seconds[method] = time.perf_counter() - start
            seconds = tuple(answer.seconds for answer in answers if answer is not None)
            self.last_worker_seconds[method] = seconds
            self.busy_seconds += max(seconds)
        return gather(mode, [None if answer is None else answer.value for answer in answers], self._grid)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        dispatch_of(self._worker_cls, name)
        return partial(self.call, name)

    def close(self) -> None:
        """End the workers. One that is busy or failed is ended at once; others run their own `close` first."""
        idle = self._lock.acquire(blocking=False)
        try:
            self._backend.close(graceful=idle)
        finally:
            if idle:
                self._lock.release()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_group(
    worker_cls: type, worker_args: Sequence[Any], cluster: ClusterConfig, grid: RankGrid, device: Device
) -> WorkerGroup:
    """Start one worker a rank, each built as worker_cls(rank, world_size, *worker_args), and wait until all are up.

    ClusterError where the resources cannot be had or a rank does not start within cluster.start_timeout_s; an
    error of a worker's constructor is raised as itself. Nothing that was started is left behind then.
    """
    world = 1 if cluster.backend == "inline" else cluster.nnodes * cluster.n_gpus_per_node
    if grid.world != world:
        raise ClusterError(
            f"the layout has {grid.world} ranks, but cluster.backend={cluster.backend} with "
            f"cluster.nnodes={cluster.nnodes} and cluster.n_gpus_per_node={cluster.n_gpus_per_node} starts "
            f"{world} -- make them agree"
        )
    backend: Backend
    if cluster.backend == "inline":
        from megatron_rl.cluster.inline import InlineBackend

        backend = InlineBackend(worker_cls, worker_args, cluster, device)
    else:
        from megatron_rl.cluster.ray_backend import RayBackend

        backend = RayBackend(worker_cls, worker_args, cluster, device)
    return WorkerGroup(worker_cls, backend, grid, cluster.step_timeout_s)
