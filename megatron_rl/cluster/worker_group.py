"""N workers as one object."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from megatron_rl.cluster.backend import Backend
from megatron_rl.cluster.dispatch import Call, RankGrid, Replicas, call_by_replica, call_for_all, method_path
from megatron_rl.cluster.nodecheck_run import NodeCheck
from megatron_rl.cluster.resources import Device
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError

WorkerT = TypeVar("WorkerT")
EntryT = TypeVar("EntryT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


class WorkerGroup:
    """Calls a method on the ranks and waits. The method is named by its class, so that its signature holds here too:

        group.each_dp(TrainWorker.step, [micros_of_dp_0, micros_of_dp_1], "actor", objective)  ->  list[UpdateResult]

    The class is that of the group's workers, or of a component of theirs (ColocatedWorker has a TrainWorker and an
    EngineWorker). Calls from several threads run one after the other, since a rank does one thing at a time; two groups
    do not wait for each other. A worker's error is raised as itself, with its rank in a note; ClusterError names ranks
    that are dead or do not answer within the deadline, after which the group is of no more use.
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
        """method -> seconds inside the method on each rank, in the last call."""
        self.busy_seconds = 0.0
        """Sum over all calls of the slowest rank's seconds: what the controller could not have saved."""

    @property
    def grid(self) -> RankGrid:
        return self._grid

    @property
    def backend(self) -> Backend:
        return self._backend

    def all(
        self, method: Callable[Concatenate[WorkerT, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[ResultT]:
        """The same call on every rank; every rank's result."""
        return self._call(method, call_for_all(args, kwargs, self._grid), range(self._grid.world))

    def rank0(
        self, method: Callable[Concatenate[WorkerT, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """The same call on every rank, which may be a collective; rank 0's result."""
        return self._call(method, call_for_all(args, kwargs, self._grid), [0])[0]

    def each_dp(
        self,
        method: Callable[Concatenate[WorkerT, EntryT, P], ResultT],
        entries: Sequence[EntryT],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[ResultT]:
        """Entry d as the first argument of all ranks of data-parallel replica d; a result of each replica."""
        return self._each(method, entries, args, kwargs, self._grid.dp, "data-parallel replica")

    def each_engine(
        self,
        method: Callable[Concatenate[WorkerT, EntryT, P], ResultT],
        entries: Sequence[EntryT],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[ResultT]:
        """Entry e as the first argument of all ranks of rollout engine e; a result of each engine."""
        if self._grid.engines is None:
            raise ClusterError(f"{method.__qualname__}: the group of {self._worker_cls.__name__} has no engines")
        return self._each(method, entries, args, kwargs, self._grid.engines, "rollout engine")

    def _each(
        self,
        method: Callable[..., ResultT],
        entries: Sequence[object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        replicas: Replicas,
        what: str,
    ) -> list[ResultT]:
        try:
            calls = call_by_replica(entries, args, kwargs, replicas, what)
        except ClusterError as error:
            error.add_note(f"in {method.__qualname__}")
            raise
        return self._call(method, calls, replicas.heads)

    def _call(self, method: Callable[..., ResultT], calls: Sequence[Call], ranks: Sequence[int]) -> list[ResultT]:
        """Call the method everywhere; the results of `ranks`, in that order."""
        path = method_path(self._worker_cls, method)
        wanted = set(ranks)
        keep = [rank in wanted for rank in range(self._grid.world)]
        with self._lock:
            start = time.perf_counter()
            answers = self._backend.call(path, calls, keep, self._timeout_s)
            self.last_seconds[path] = time.perf_counter() - start
            seconds = tuple(answer.seconds for answer in answers if answer is not None)
            self.last_worker_seconds[path] = seconds
            self.busy_seconds += max(seconds)
        results = [None if answer is None else answer.value for answer in answers]
        # What came over the border is what the method returned there.
        return [cast(ResultT, results[rank]) for rank in ranks]

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
    worker_cls: type,
    worker_args: Sequence[Any],
    cluster: ClusterConfig,
    grid: RankGrid,
    device: Device,
    takes_cpus: bool = True,
    check: NodeCheck | None = None,
) -> WorkerGroup:
    """Start one worker a rank, each built as worker_cls(rank, world_size, *worker_args), and wait until
    all of them are up.

    takes_cpus: whether the ranks count against Ray's CPUs (cluster.num_cpus_per_rank). check: what is looked at on the
    nodes before workers are built; not on the inline backend.

    ClusterError if the resources cannot be had or a rank does not start within cluster.start_timeout_s; an
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

        backend = RayBackend(worker_cls, worker_args, cluster, device, grid.names, takes_cpus, check)
    return WorkerGroup(worker_cls, backend, grid, cluster.step_timeout_s)
