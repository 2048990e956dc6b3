"""Worker groups on a real local Ray: dispatch, errors, deadlines, deaths, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from ray._private import internal_api

from megatron_rl.cluster import ray_runtime, ray_wait, stop
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.environment import free_port
from megatron_rl.cluster.handles import hand_over
from megatron_rl.cluster.ray_backend import RayBackend
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError, DataError, RankDied, RankHung
from megatron_rl.types import Handle

ROOT = Path(__file__).parents[2]
GRID = RankGrid.flat(2)


def two_ranks(**changes) -> ClusterConfig:
    return ClusterConfig(device="cpu", n_gpus_per_node=2, num_cpus_per_rank=0.5, start_timeout_s=120.0, **changes)


class Worker:
    def __init__(self, rank: int, world: int, word: str) -> None:
        if word == f"fail on {rank}":
            raise DataError("no such word")
        self.rank, self.world, self.word = rank, world, word

    def who(self) -> tuple[int, int, str]:
        return self.rank, self.world, self.word

    def total(self, values: np.ndarray, scale: float = 1.0) -> float:
        return float(values.sum()) * scale + self.rank

    def double(self, values: list[int], plus: int = 0) -> list[int]:
        return [2 * value + plus for value in values]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "cwd": os.getcwd()}

    def fail(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            raise DataError(f"row {self.rank} has no prompt")

    def nap(self, seconds: list[float]) -> int:
        time.sleep(seconds[self.rank])
        return self.rank

    def fail_while_others_wait(self) -> None:
        if self.rank == 1:
            raise DataError("early")
        time.sleep(60)

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(3)
        time.sleep(60)

    def make(self, number: int) -> Handle[np.ndarray]:
        return hand_over(np.full(1_000_000, 10.0 * number + self.rank))

    def first_of(self, handles: list[Handle[np.ndarray]]) -> list[float]:
        arrays = [handle.fetch() for handle in handles]
        assert not any(array.flags.writeable for array in arrays)
        return [float(array[0]) for array in arrays]

    def half(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[: len(tensor) // 2] for name, tensor in tensors.items()}


class Stranger:
    def who(self) -> None:
        """Of another class than the group's."""


JOINING_RUN = """
import sys, time
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.worker_group import start_group
from megatron_rl.config.sections.cluster import ClusterConfig

class Sleeper:
    def __init__(self, rank, world):
        pass
    def nap(self, seconds):
        time.sleep(seconds)

cluster = ClusterConfig(device="cpu", num_cpus_per_rank=0.5, ray_address=sys.argv[1])
with start_group(Sleeper, (), cluster, RankGrid.flat(1), "cpu") as group:
    print(*group.backend.pids, flush=True)
    group.all(Sleeper.nap, 60)
"""


def ray_processes() -> list[str]:
    """Command lines of what runs below this process and belongs to Ray. Ranks of other tests leave a server of forks,
    whose command line names what it has imported.
    """
    found: list[str] = []
    for child in psutil.Process().children(recursive=True):
        # One that ends meanwhile is none that stays.
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return [line for line in found if "ray" in line.lower() and "multiprocessing.forkserver" not in line]


@pytest.fixture(scope="module", autouse=True)
def ray_port() -> Iterator[int]:
    """A Ray of this process on a port of our choice. Once the last user releases it, none of its processes is left."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_wait, "GRACE_S", 1.0)
        ray_runtime.acquire(two_ranks(ray_port=port), "cpu")
        assert len(ray_processes()) >= 4
        yield port
        ray_runtime.release()
        assert ray_processes() == []


@pytest.fixture(scope="module")
def group(ray_port) -> Iterator[WorkerGroup]:
    with start_group(Worker, ("hello",), two_ranks(), GRID, "cpu") as group:
        yield group


def short_lived(step_timeout_s: float = 60.0) -> WorkerGroup:
    return start_group(Worker, ("short",), two_ranks(step_timeout_s=step_timeout_s), GRID, "cpu")


def pids_of(group: WorkerGroup) -> list[int]:
    assert isinstance(group.backend, RayBackend)
    return group.backend.pids


def test_workers_are_built_with_rank_world_and_arguments(group):
    assert group.all(Worker.who) == [(0, 2, "hello"), (1, 2, "hello")]


def test_dispatch_modes_reach_the_ranks_and_collect_their_results(group):
    assert group.each_dp(Worker.double, [[1, 2], [3]], plus=1) == [[3, 5], [7]]
    assert group.rank0(Worker.total, np.arange(200_000.0), scale=2.0) == 2.0 * np.arange(200_000.0).sum()
    with pytest.raises(ClusterError, match=r"one entry per data-parallel replica \(2\), but got 3 entries"):
        group.each_dp(Worker.double, [[1], [2], [3]])
    with pytest.raises(ClusterError, match=r"Stranger\.who is no method of the group's workers"):
        group.all(Stranger.who)
    with pytest.raises(ClusterError, match="the group of Worker has no engines"):
        group.each_engine(Worker.double, [[1], [2]])


def test_workers_get_torchruns_variables_and_the_controllers_folder(group):
    environment = group.rank0(Worker.environment)
    assert environment["RANK"] == "0" and environment["WORLD_SIZE"] == "2"
    assert environment["LOCAL_RANK"] == "0" and environment["LOCAL_WORLD_SIZE"] == "2"
    assert environment["MASTER_ADDR"] == "127.0.0.1" and int(environment["MASTER_PORT"]) > 0
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["cwd"] == os.getcwd()


def store_bytes() -> int:
    """Bytes in the object store of this node."""
    reply = internal_api.get_memory_info_reply(
        internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    )
    return reply.store_stats.object_store_bytes_used


def settles_below(limit: int) -> bool:
    """Whether the object store comes to hold less than `limit` bytes; Ray frees once a second."""
    deadline = time.monotonic() + 20.0
    while store_bytes() >= limit and time.monotonic() < deadline:
        time.sleep(0.1)
    return store_bytes() < limit


def test_a_value_goes_from_rank_to_rank_by_handle_and_the_store_does_not_grow_over_steps(group):
    size = 16_000_000
    for step in range(4):
        handles = group.all(Worker.make, step)
        assert group.all(Worker.first_of, handles) == [[10.0 * step, 10.0 * step + 1]] * 2
        assert float(handles[1].fetch()[-1]) == 10.0 * step + 1
        assert store_bytes() >= size, "a step's own values are there until it ends"
        assert settles_below(2 * size), f"values of earlier steps are still there in step {step}"
    del handles
    assert settles_below(size), "freed with the last handle"


def test_tensors_of_any_type_go_and_come_back(group):
    tensors = {
        "half": torch.arange(100_000, dtype=torch.bfloat16),
        "flags": torch.arange(100_000) % 3 == 0,
        "ids": torch.arange(100_000),
        "none": torch.zeros(0),
        "strided": torch.arange(200_000.0).reshape(-1, 2).t().reshape(2, -1).t()[:, 0],
    }
    for found in group.all(Worker.half, tensors):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor[: len(tensor) // 2]) and found[name].dtype == tensor.dtype


def test_a_workers_error_is_itself_and_says_its_rank(group):
    with pytest.raises(DataError, match="row 1 has no prompt") as caught:
        group.all(Worker.fail, [1])
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1 in Worker.fail" in notes and "test_ray_backend.py" in notes and "\x1b" not in notes
    with pytest.raises(DataError) as caught:
        group.all(Worker.fail, [0, 1])
    assert "failed as well: DataError: row" in "\n".join(caught.value.__notes__)
    assert group.all(Worker.who)[0] == (0, 2, "hello"), "the ranks are in step, so the group goes on"


def test_seconds_are_those_of_the_slowest_rank(group):
    before = group.busy_seconds
    assert group.all(Worker.nap, [0.05, 0.3]) == [0, 1]
    assert 0.3 <= group.last_seconds["nap"] < 5.0
    slow, slower = group.last_worker_seconds["nap"]
    assert 0.05 <= slow < 0.3 <= slower <= group.last_seconds["nap"]
    assert group.busy_seconds - before == pytest.approx(slower)


def test_calls_of_several_threads_run_one_after_the_other(group):
    spans = []

    def nap() -> None:
        group.all(Worker.nap, [0.2, 0.2])
        spans.append((time.perf_counter() - group.last_seconds["nap"], time.perf_counter()))

    threads = [threading.Thread(target=nap) for _ in range(2)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - start > 0.4


def test_waiting_for_many_ranks_asks_ray_a_few_times_and_keeps_every_answer_and_error(ray_port, monkeypatch):
    asked: list[int] = []
    ready = ray_wait._ready

    def counted(pending, count, timeout_s):
        asked.append(count)
        return ready(pending, count, timeout_s)

    monkeypatch.setattr(ray_wait, "_ready", counted)
    refs = {ray.put(f"answer {rank}"): rank for rank in range(500)}
    outcome = ray_wait.wait_for_ranks(refs, 60.0, lambda: False)
    assert outcome == ray_wait.Outcome({rank: f"answer {rank}" for rank in range(500)})
    assert len(asked) <= 10, "a question a rank is quadratic"

    @ray.remote(num_cpus=0)
    def fail(after_s: float) -> None:
        time.sleep(after_s)
        raise DataError("no prompt")

    # Both wait for a process to start, the second maybe longer.
    refs = {fail.remote(15.0): 500, **refs, fail.remote(0.0): 501}
    outcome = ray_wait.wait_for_ranks(refs, 60.0, lambda: False)
    assert outcome.answers == {rank: f"answer {rank}" for rank in range(500)} and outcome.dead == {}
    assert [rank for rank, _ in outcome.errors] == [501], "the second is given up a while after the first"
    assert outcome.late == [500]


def test_a_late_rank_is_named_with_where_it_is_and_the_group_is_done():
    """R7"""
    with short_lived(step_timeout_s=3.0) as group:
        group.all(Worker.who)
        start = time.monotonic()
        with pytest.raises(RankHung) as caught:
            group.all(Worker.nap, [0.0, 60.0])
        assert 3.0 <= time.monotonic() - start < 8.0, "the deadline's real time"
        text = str(caught.value)
        assert "Worker.nap: rank(s) [1] of 2 did not answer within 3 s" in text
        assert "(answered: [0]; last call that ended: who) -- raise cluster.step_timeout_s" in text
        assert "rank 1 (" in text and "since 'begin of nap'" in text and "time.sleep(seconds[self.rank])" in text
        with pytest.raises(ClusterError, match=r"Worker.who: .* Worker.nap left ranks \[1\] without an answer"):
            group.all(Worker.who)
        pids = pids_of(group)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_dead_actor_is_named_by_rank():
    """R7"""
    with short_lived() as group:
        start = time.monotonic()
        with pytest.raises(RankDied, match=r"^Worker\.die: rank 1 died \(.*ended without a word to Ray") as caught:
            group.all(Worker.die, 1)
        assert time.monotonic() - start < 20
        assert "rank 0" not in str(caught.value)


def test_an_error_ends_the_wait_for_ranks_that_never_answer():
    with short_lived() as group:
        with pytest.raises(DataError, match="early") as caught:
            group.all(Worker.fail_while_others_wait)
        assert "rank(s) [0] had not answered when the call was given up" in caught.value.__notes__
        with pytest.raises(ClusterError, match="cannot be called any more"):
            group.all(Worker.who)


def test_an_error_in_a_constructor_is_itself_and_nothing_stays(group):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(DataError, match="no such word") as caught:
        start_group(Worker, ("fail on 1",), two_ranks(), GRID, "cpu")
    assert any(note.startswith("on rank 1 in Worker.__init__ (") for note in caught.value.__notes__)
    left: list[str] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            left += [child.name()] if child.pid not in before else []
    assert not [name for name in left if "RankHost" in name]


def test_more_cpus_than_the_machine_has_is_an_error_with_both_numbers():
    cores = os.cpu_count() or 1
    cluster = ClusterConfig(device="cpu", n_gpus_per_node=2, num_cpus_per_rank=float(cores))
    with pytest.raises(ClusterError, match=rf"ask for {2 * cores} CPU on one node, but Ray has {cores} CPU"):
        start_group(Worker, ("x",), cluster, GRID, "cpu")


def test_cpus_that_others_hold_are_waited_for_no_longer_than_the_start_may_take(group):
    cores = os.cpu_count() or 1
    cluster = ClusterConfig(device="cpu", n_gpus_per_node=2, num_cpus_per_rank=cores / 2, start_timeout_s=1.0)
    with pytest.raises(ClusterError, match=rf"2 ranks ask for {cores} CPU, but of Ray's resources only"):
        start_group(Worker, ("x",), cluster, GRID, "cpu")


def test_the_port_is_honoured_and_one_in_use_is_refused_before_the_start(ray_port):
    assert ray.get_runtime_context().gcs_address.endswith(f":{ray_port}")
    with pytest.raises(ClusterError, match=rf"cluster\.ray_port: {ray_port} -- .* leave cluster\.ray_port out"):
        ray_runtime.require_free_port(ray_port)


def test_ctrl_c_in_a_run_that_joined_this_ray_ends_its_busy_workers_at_once(ray_port):
    command = [sys.executable, "-c", JOINING_RUN, f"127.0.0.1:{ray_port}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    started = run.stdout.readline()
    if not started:
        pytest.fail(run.stderr.read())
    (pid,) = map(int, started.split())
    assert psutil.pid_exists(pid)
    time.sleep(0.5)  # into the call
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors and run.returncode != 0
    assert time.monotonic() - start < 8, "busy workers are not waited for"
    assert not psutil.pid_exists(pid)


def test_a_call_that_a_signal_interrupts_is_waited_for_before_the_next(group):
    """So that a run can save after a signal, whatever its ranks were doing."""
    with pytest.raises(KeyboardInterrupt), stop.signals():
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        start = time.monotonic()
        group.all(Worker.nap, [1.0, 3.0])
    assert time.monotonic() - start < 2.0, "the wait ends with the signal"
    assert [rank for rank, _, _ in group.all(Worker.who)] == [0, 1]
    assert time.monotonic() - start >= 3.0, "the ranks had to end their naps first"


@pytest.mark.parametrize(
    "address, said",
    [
        ("127.0.0.1:1", "Connection refused"),
        ("no.such.host.invalid:6379", "no Ray cluster answers there"),
        ("nonsense", "no Ray cluster answers there"),
        ("LISTENS", "what listens there does not answer as Ray"),
    ],
)
def test_a_wrong_address_ends_within_its_deadline(address, said):
    start = time.monotonic()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = address.replace("LISTENS", f"127.0.0.1:{server.getsockname()[1]}")
        command = [sys.executable, "-c", JOINING_RUN, address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"cluster.ray_address: '{address}'" in done.stderr and said in done.stderr
    assert "or leave cluster.ray_address out" in done.stderr
    assert time.monotonic() - start < 45, "30 s, and the time that imports take on a busy machine"


def test_a_close_from_another_thread_ends_a_call_that_runs(group):
    """Last of those that use the module's group: it closes it."""
    seen: list[Exception] = []

    def nap() -> None:
        try:
            group.all(Worker.nap, [60.0, 60.0])
        except ClusterError as error:
            seen.append(error)

    thread = threading.Thread(target=nap)
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    group.close()
    thread.join(timeout=10)
    assert time.monotonic() - start < 8 and not thread.is_alive()
    assert "Worker.nap: the group was closed during the call" in str(seen[0])
