"""Worker processes as Ray actors, one a rank, in a placement group."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.cluster import ray_runtime, stop
from megatron_rl.cluster.addresses import ray_address
from megatron_rl.cluster.backend import Answer
from megatron_rl.cluster.dispatch import Call
from megatron_rl.cluster.environment import differences, network_environment, rank_environment, worker_environment
from megatron_rl.cluster.node_facts import NodeFacts, ask_nodes_of_themselves
from megatron_rl.cluster.nodecheck_run import NodeCheck, Ranks, check_nodes
from megatron_rl.cluster.rank_host import RankHost, RankLocation
from megatron_rl.cluster.ray_faults import RankWatch
from megatron_rl.cluster.ray_wait import Outcome, unwrapped, wait_for_ranks
from megatron_rl.cluster.resources import (
    Device,
    RankPlacement,
    in_order,
    placement_table,
    plan_placement,
    require_room,
)
from megatron_rl.cluster.surroundings import in_copied_folder
from megatron_rl.cluster.watch import Watch
from megatron_rl.cluster.watch_lookout import Lookout
from megatron_rl.cluster.watch_report import Home
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError, NodeLost, RankHung

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
CLOSE_S = 10.0
"""How long workers may take to close, and their processes to be gone."""
KILL_S = 3.0
"""How long Ray may take to end processes; then they are killed here."""


class RayBackend:
    """See Backend. Built up in order: Ray, placement group, actors, their environment, their workers."""

    def __init__(
        self,
        worker_cls: type,
        worker_args: Sequence[Any],
        cluster: ClusterConfig,
        device: Device,
        names: Sequence[str] = (),
        takes_cpus: bool = True,
        check: NodeCheck | None = None,
    ) -> None:
        """Start every rank within cluster.start_timeout_s. On any error, everything that was started is stopped.

        names: what each rank is; none, and no table of ranks is printed. takes_cpus, check: see start_group.
        """
        self._name = worker_cls.__name__
        self._watch = RankWatch(uuid.uuid4().hex[:12], cluster.hang_timeout_s)
        self._cluster = cluster
        self._actors: list[Any] = []
        self._places: list[RankLocation] = []
        self._names = names
        self._facts: dict[str, NodeFacts] = {}
        """Node id -> what the node says of itself; empty if the run has a Ray of its own, on this node alone."""
        self._local: list[psutil.Process] = []
        """The ranks' processes on this node."""
        self._group: PlacementGroup | None = None
        self._closing = False
        self._broken: str | None = None
        self._unanswered: dict[ray.ObjectRef, int] = {}
        """Calls whose wait was interrupted, and the rank of each."""
        self._last_call: str | None = None
        self._num_calls = 0
        ray_runtime.acquire(cluster, device)
        try:
            self._start(worker_cls, worker_args, device, takes_cpus, check)
        except BaseException:
            self.close(graceful=False)
            raise

    @property
    def world(self) -> int:
        return len(self._actors)

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, on its node."""
        return [place.pid for place in self._places]

    def call(
        self, method: str, calls: Sequence[Call | None], keep: Sequence[bool], timeout_s: float
    ) -> list[Answer | None]:
        """See Backend.call. Shared arguments go once into Ray's object store, where numpy arrays are read-only."""
        if self._broken is not None:
            raise ClusterError(f"{self._name}.{method}: the workers cannot be called any more: {self._broken}")
        self._settle(timeout_s)
        try:
            shipped = _ship(calls)
        except RayError as error:
            lost = f"{self._name}.{method}: Ray's object store on the controller's node fails: {error}"
            raise NodeLost(lost) from error

        watch = self._next_watch(self._cluster.hang_timeout_s, timeout_s)

        def submit(rank: int) -> Any:
            return self._actors[rank].call.remote(watch, method, shipped[rank], keep[rank])

        ranks = [rank for rank, call in enumerate(calls) if call is not None]
        answers = self._on_ranks(ranks, submit, method, timeout_s, "cluster.step_timeout_s", watch.quiet_s)
        self._last_call = method
        return [answers.get(rank) for rank in range(self.world)]

    def close(self, graceful: bool) -> None:
        """See Backend.close. An error of a worker's own `close` is raised once everything is ended."""
        if self._closing:
            return
        self._closing = True
        with ExitStack() as stack:
            stack.callback(ray_runtime.release)
            stack.callback(self._watch.forget)
            stack.callback(self._end_processes)
            if graceful and self._broken is None and not self._unanswered:
                self._close_workers()

    def _start(
        self, worker_cls: type, worker_args: Sequence[Any], device: Device, takes_cpus: bool, check: NodeCheck | None
    ) -> None:
        deadline = time.monotonic() + self._cluster.start_timeout_s
        placement = plan_placement(self._cluster, device, takes_cpus)
        require_room(placement, self._cluster, ray_runtime.node_resources())
        self._group = self._reserve(placement, deadline)
        nodes = _nodes_of_bundles(self._group, len(placement.bundles))
        if ray_address(self._cluster) is not None:
            left_s = max(1.0, deadline - time.monotonic())
            wanted = self._cluster.network_interface
            self._facts = ask_nodes_of_themselves(nodes, os.environ, wanted, left_s)
            at = [self._facts[node] for node in nodes]
            placement = in_order(placement, [fact.topology for fact in at], [fact.address.ip for fact in at])
            if self._names:
                for line in differences(os.environ, {fact.host: fact.environment for fact in self._facts.values()}):
                    logger.warning(line)
        own_of = {node: fact.environment for node, fact in self._facts.items()}
        environments = [worker_environment(self._cluster, device, os.environ, own_of.get(node)) for node in nodes]
        self._actors = [
            _actor(self._group, placement, rank, environments[placement.bundle_of_rank[rank]])
            for rank in range(placement.world)
        ]

        def on_all(method: str, submit: Callable[[int], Any]) -> list[Any]:
            left_s = max(0.0, deadline - time.monotonic())
            answers = self._on_ranks(range(self.world), submit, method, left_s, "cluster.start_timeout_s")
            return [answers[rank] for rank in range(self.world)]

        places: list[RankLocation] = on_all("place", lambda rank: self._actors[rank].place.remote())
        # Ranks of a node are numbered in the order of its GPUs.
        per_node = self._cluster.n_gpus_per_node
        order = sorted(range(self.world), key=lambda rank: (rank // per_node, places[rank].gpu_index))
        self._actors = [self._actors[rank] for rank in order]
        self._places = [places[rank] for rank in order]
        self._watch.places = self._places
        here = ray_runtime.own_node()
        for place in self._places:
            with suppress(psutil.NoSuchProcess):
                self._local += [psutil.Process(place.pid)] if place.node_id == here else []
        if self._names and (self._facts or self.world > 1):
            logger.info("ranks of %s\n%s", self._name, self._table())
        own = self._rank_environments(device)
        folder = None if in_copied_folder(os.environ) else os.getcwd()
        cache_dir = self._cluster.cache_dir
        on_all("prepare", lambda rank: self._actors[rank].prepare.remote(own[rank], folder, cache_dir))
        if check is not None:
            check_nodes(check, self._ranks(device), self._ask)
        args = ray.put(tuple(worker_args))
        # Building models and engines has few beats, and a deadline of its own.
        watch, key = self._next_watch(math.inf, max(1.0, deadline - time.monotonic())), self._watch.key
        on_all(
            "__init__",
            lambda rank: self._actors[rank].start.remote(watch, key(rank), worker_cls, rank, self.world, args),
        )

    def _ranks(self, device: Device) -> Ranks:
        """Where the ranks are, for the checks of nodes."""
        facts = [self._facts.get(place.node_id) for place in self._places]
        addresses = ["127.0.0.1" if fact is None else fact.address.ip for fact in facts]
        return Ranks(device, self._cluster.n_gpus_per_node, addresses, are_here=not self._facts)

    def _ask(
        self,
        ranks: Sequence[int],
        function: Callable[..., ResultT],
        args: Sequence[tuple[object, ...]],
        timeout_s: float,
    ) -> list[ResultT]:
        """See nodecheck_run.Ask."""
        of_rank = dict(zip(ranks, args, strict=True))

        def submit(rank: int) -> Any:
            return self._actors[rank].examine.remote(function, of_rank[rank])

        answers = self._on_ranks(ranks, submit, function.__name__, timeout_s, "cluster.start_timeout_s")
        return [answers[rank] for rank in ranks]

    def _reserve(self, placement: RankPlacement, deadline: float) -> PlacementGroup:
        group = placement_group([dict(bundle) for bundle in placement.bundles], strategy=placement.strategy)
        if not group.wait(max(1.0, deadline - time.monotonic())):
            remove_placement_group(group)
            names = sorted(placement.per_rank)
            asked = " and ".join(f"{placement.world * placement.per_rank[name]:g} {name}" for name in names)
            free = ray.available_resources()
            there = " and ".join(f"{free.get(name, 0.0):g} {name}" for name in names)
            raise ClusterError(
                f"{placement.world} ranks ask for {asked}, but of Ray's resources only {there} were free "
                f"for {self._cluster.start_timeout_s:g} s -- end the other jobs of this Ray, or ask for less"
            )
        return group

    def _rank_environments(self, device: Device) -> list[dict[str, str]]:
        per_node = self._cluster.n_gpus_per_node
        head, several = self._places[0], self._cluster.nnodes > 1
        address = self._facts[head.node_id].address.ip if several else "127.0.0.1"
        environments: list[dict[str, str]] = []
        for rank, place in enumerate(self._places):
            local = place.gpu_index if device == "cuda" else rank % per_node
            own = rank_environment(rank, self.world, local, per_node, address, head.port)
            if several:
                here = self._facts[place.node_id].address
                own |= network_environment(here.ip, here.interface, self._cluster.network_interface)
            environments.append(own)
        return environments

    def _table(self) -> str:
        rows: list[tuple[str, ...]] = []
        for rank, place in enumerate(self._places):
            fact = self._facts.get(place.node_id)
            host, ip = (os.uname().nodename, place.ip) if fact is None else (fact.host, fact.address.ip)
            gpu = "-" if place.gpu_index < 0 else str(place.gpu_index)
            rows.append((host, ip, gpu, self._names[rank]))
        return placement_table(rows)

    def _on_ranks(
        self,
        ranks: Sequence[int],
        submit: Callable[[int], Any],
        method: str,
        timeout_s: float,
        timeout_key: str,
        quiet_s: float = math.inf,
    ) -> dict[int, Any]:
        """Submit to each rank and wait. A failure that leaves the ranks out of step ends the group."""
        where = f"{self._name}.{method}"
        # All ranks or none: one that is not called would leave the others waiting for it.
        with stop.held():
            refs = {submit(rank): rank for rank in ranks}
            self._unanswered = refs
        lookout = self._watch.lookout(self._num_calls, quiet_s)
        outcome = wait_for_ranks(refs, timeout_s, lambda: self._closing, lookout.hangs)
        self._unanswered = {}
        fault = self._fault(where, outcome, lookout, timeout_s, timeout_key)
        if fault is not None:
            raise fault
        if outcome.errors:
            raise _first_error(where, outcome, self._watch.home)
        return outcome.answers

    def _fault(
        self, where: str, outcome: Outcome, lookout: Lookout, timeout_s: float, timeout_key: str
    ) -> ClusterError | None:
        """What is wrong with ranks that gave no answer; the group is broken then. None where an error says it."""
        if not outcome.dead and not outcome.late:
            return None
        self._broken = f"{where} left ranks {sorted([*outcome.dead, *outcome.late])} without an answer"
        if self._closing:
            return ClusterError(f"{where}: the group was closed during the call")
        if outcome.dead:
            return self._watch.death(where, self._num_calls, outcome)
        lost = self._watch.lost_behind(where, self._num_calls, outcome)
        if lost is not None or outcome.errors:
            return lost
        if outcome.hung:
            return self._watch.hang(where, outcome, lookout, self._last_call or "none")
        return RankHung(self._late_text(where, outcome, timeout_s, timeout_key))

    def _settle(self, timeout_s: float) -> None:
        """Wait for the ranks that an interrupted call left running; their results are dropped."""
        refs, self._unanswered = self._unanswered, {}
        if not refs:
            return
        where = f"{self._name}: the call that was interrupted"
        lookout = self._watch.lookout(self._num_calls, self._cluster.hang_timeout_s)
        outcome = wait_for_ranks(refs, timeout_s, lambda: self._closing, lookout.hangs)
        fault = self._fault(where, outcome, lookout, timeout_s, "cluster.step_timeout_s")
        if fault is None and outcome.late:
            fault = ClusterError(f"{self._name}: {self._broken}, after the error of another")
        if fault is not None:
            raise fault

    def _late_text(self, where: str, outcome: Outcome, timeout_s: float, timeout_key: str) -> str:
        lines = [
            f"{where}: rank(s) {outcome.late} of {self.world} did not answer within {timeout_s:g} s "
            f"(answered: {sorted(outcome.answers) or 'none'}; last call that ended: "
            f"{self._last_call or 'none'}) -- raise {timeout_key} if the work takes that long"
        ]
        return "\n".join([*lines, *self._watch.late_lines(self._num_calls, outcome.late)])

    def _next_watch(self, quiet_s: float, timeout_s: float) -> Watch:
        """Of the next call."""
        self._num_calls += 1
        # Shortly before the deadline, so that the stacks are there when the controller gives up.
        return Watch(self._num_calls, quiet_s, max(timeout_s - 5.0, timeout_s / 2))

    def _close_workers(self) -> None:
        """Let each worker close; one that misses the deadline is killed. Raises the first error."""
        refs = {actor.close.remote(): rank for rank, actor in enumerate(self._actors)}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=CLOSE_S)
        for ref in done:
            try:
                ray.get(ref)
            except RayTaskError as error:
                raise unwrapped(error, f"on rank {refs[ref]} in {self._name}.close") from None

    def _end_processes(self) -> None:
        """Kill the ranks and wait for those of this node: ray.kill returns before a process has ended, and has no
        effect if the node's raylet is gone. Never raises: it must not take an error's place, nor end a good run.
        """
        # A node or a head that is gone has nothing left to end.
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
        _, alive = psutil.wait_procs(self._local, timeout=KILL_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(alive, timeout=CLOSE_S)
        if alive:
            pids = [process.pid for process in alive]
            logger.warning("worker processes %s do not end: a system call holds them, such as one of a driver", pids)


def _nodes_of_bundles(group: PlacementGroup, count: int) -> list[str]:
    """Id of the node that holds each bundle."""
    table: Mapping[str, Any] = placement_group_table(group)
    return [table["bundles_to_node_id"][bundle] for bundle in range(count)]


def _actor(group: PlacementGroup, placement: RankPlacement, rank: int, environment: Mapping[str, str]) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=placement.bundle_of_rank[rank])
    # Every rank sees all GPUs of its node, as under torchrun: LOCAL_RANK says which one is its own.
    variables = {**environment, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    options = ray.remote(RankHost).options(
        num_cpus=placement.per_rank.get("CPU", 0),
        num_gpus=placement.per_rank.get("GPU", 0),
        max_restarts=0,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": variables},
    )
    return options.remote()


def _ship(calls: Sequence[Call | None]) -> list[Any]:
    """Put arguments that several ranks share into the object store once; the others travel with their call."""
    users: dict[int, int] = {}
    for call in calls:
        users[id(call)] = users.get(id(call), 0) + 1
    stored = {id(call): ray.put(call) for call in calls if call is not None and users[id(call)] > 1}
    return [stored.get(id(call), call) for call in calls]


def _first_error(where: str, outcome: Outcome, home: Callable[[int], Home]) -> BaseException:
    """The first error to arrive, as itself; notes say its rank, its traceback there, and what other ranks did."""
    rank, task_error = outcome.errors[0]
    error = unwrapped(task_error, f"on rank {rank} in {where} ({home(rank)})")
    for other, further in outcome.errors[1:]:
        cause = unwrapped(further, "")
        error.add_note(f"rank {other} failed as well: {type(cause).__name__}: {cause}")
    if outcome.late:
        error.add_note(f"rank(s) {outcome.late} had not answered when the call was given up")
    return error
