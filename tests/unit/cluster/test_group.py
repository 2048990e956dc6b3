"""Worker groups with one rank in this process, and the pure parts of starting one."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import assert_type

import pytest

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.environment import (
    differences,
    free_port,
    held_port,
    network_environment,
    port_in_use,
    rank_environment,
    worker_environment,
)
from megatron_rl.cluster.resources import (
    RankPlacement,
    device_of_nodes,
    in_order,
    placement_table,
    plan_placement,
    require_room,
    resolve_device,
)
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError, DataError

INLINE = ClusterConfig(backend="inline", device="cpu")


CLOSED: list[int] = []


class Worker:
    def __init__(self, rank: int, world: int, word: str) -> None:
        if word == "bad":
            raise DataError("bad word")
        self.rank, self.world, self.word = rank, world, word
        self.running = 0

    def shout(self, text: str) -> str:
        return f"{self.word} {text}!"

    def variables(self) -> dict[str, str]:
        return dict(os.environ)

    def nap(self) -> None:
        self.running += 1
        assert self.running == 1
        time.sleep(0.05)
        self.running -= 1

    def fail(self) -> None:
        raise DataError("row 3")

    def close(self) -> None:
        CLOSED.append(self.rank)


def inline_group() -> WorkerGroup:
    return start_group(Worker, ("hey",), INLINE, RankGrid.flat(1), "cpu")


def test_inline_calls_a_worker_in_this_process_and_closes_it():
    CLOSED.clear()
    with inline_group() as group:
        assert group.each_dp(Worker.shout, ["you"]) == ["hey you!"]
        assert CLOSED == []
    group.close()
    assert CLOSED == [0]


def test_inline_sets_the_ranks_variables_and_takes_them_back(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with inline_group() as group:
        inside = group.rank0(Worker.variables)
    assert inside["RANK"] == "0" and inside["WORLD_SIZE"] == "1" and inside["LOCAL_RANK"] == "0"
    assert inside["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "RANK" not in os.environ and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    with pytest.raises(DataError):
        start_group(Worker, ("bad",), INLINE, RankGrid.flat(1), "cpu")
    assert "RANK" not in os.environ


def test_an_error_is_itself_with_its_rank_in_a_note():
    with inline_group() as group:
        with pytest.raises(DataError, match="row 3") as caught:
            group.all(Worker.fail)
        assert "on rank 0 in Worker.fail" in caught.value.__notes__


def test_seconds_are_kept_and_threads_take_turns():
    with inline_group() as group:
        threads = [threading.Thread(target=group.all, args=(Worker.nap,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0.15 <= group.busy_seconds < 2.0
        assert group.last_seconds["nap"] >= group.last_worker_seconds["nap"][0] >= 0.05
        assert group.all(Worker.nap) == [None]


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(ClusterError, match=r"the layout has 2 ranks, but cluster.backend=inline .* starts 1"):
        start_group(Worker, ("hey",), INLINE, RankGrid.flat(2), "cpu")


def test_placement_packs_one_node_by_rank_and_several_by_node():
    one = plan_placement(ClusterConfig(n_gpus_per_node=2, num_cpus_per_rank=0.5), "cpu")
    assert one == RankPlacement("STRICT_PACK", ({"CPU": 0.5}, {"CPU": 0.5}), (0, 1), {"CPU": 0.5})
    two = plan_placement(ClusterConfig(nnodes=2, n_gpus_per_node=4, num_cpus_per_rank=2.0), "cuda")
    assert two.strategy == "STRICT_SPREAD" and two.bundles == ({"CPU": 8.0, "GPU": 4.0},) * 2
    assert two.bundle_of_rank == (0, 0, 0, 0, 1, 1, 1, 1) and two.world == 8
    light = plan_placement(ClusterConfig(nnodes=2, n_gpus_per_node=1), "cpu", takes_cpus=False)
    assert light.bundles == ({"memory": 1.0},) * 2, "a place on each node, and no CPU"


@pytest.mark.parametrize(
    ("nnodes", "nodes", "fits"),
    [
        (1, [{"CPU": 4.0, "GPU": 2.0}], True),
        (1, [{"CPU": 3.0, "GPU": 2.0}], False),
        (1, [{"CPU": 4.0}], False),
        (1, [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}], False),
        (2, [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}], True),
        (2, [{"CPU": 8.0, "GPU": 4.0}], False),
        (2, [{"CPU": 4.0, "GPU": 2.0}], False),
        (1, [], False),
    ],
)
def test_what_the_machines_can_never_hold_is_refused(nnodes, nodes, fits):
    cluster = ClusterConfig(nnodes=nnodes, n_gpus_per_node=2, num_cpus_per_rank=2.0)
    placement = plan_placement(cluster, "cuda")
    if fits:
        require_room(placement, cluster, nodes)
        return
    with pytest.raises(ClusterError, match="2 ranks of 2 CPU each ask for 4 CPU and 2 GPU"):
        require_room(placement, cluster, nodes)


def test_worker_environment_takes_the_controllers_word_but_not_for_the_engines_process():
    cluster = ClusterConfig(num_cpus_per_rank=2.5)
    controller = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "7",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "RANK": "5",
        "SECRET": "x",
    }
    values = worker_environment(cluster, "cpu", controller)
    assert values["NCCL_DEBUG"] == "INFO" and values["OMP_NUM_THREADS"] == "7"
    assert values["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and values["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert values["TORCHDYNAMO_DISABLE"] == "1" and values["VLLM_NO_USAGE_STATS"] == "1"
    assert values["HF_HUB_OFFLINE"] == "1" and not {"RANK", "SECRET"} & values.keys()
    bare = worker_environment(cluster, "cuda", {})
    assert bare["OMP_NUM_THREADS"] == "2" and "TORCHDYNAMO_DISABLE" not in bare
    assert bare["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert rank_environment(3, 8, 1, 2, "host", 9) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "9",
    }


def test_a_node_keeps_its_own_values_and_what_is_only_the_controllers_stays_there():
    controller = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "FI_PROVIDER": "efa",
        "NVSHMEM_DEBUG": "INFO",
        "LD_LIBRARY_PATH": "/opt/nccl/lib",
        "XDG_CACHE_HOME": "/scratch/cache",
        "CUDA_VISIBLE_DEVICES": "3",
        "VLLM_HOST_IP": "10.0.0.1",
        "XDG_RUNTIME_DIR": "/run/user/0",
    }
    node = {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "6", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin"}
    values = worker_environment(ClusterConfig(), "cuda", controller, node)
    assert values["NCCL_SOCKET_IFNAME"] == "ib0" and values["OMP_NUM_THREADS"] == "6"
    for name in ("UCX_NET_DEVICES", "FI_PROVIDER", "NVSHMEM_DEBUG", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"):
        assert values[name] == controller[name]
    assert not {"CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "XDG_RUNTIME_DIR", "PATH"} & values.keys()
    assert differences(controller, {"a": node, "b": {"FI_PROVIDER": "efa"}}) == [
        "NCCL_SOCKET_IFNAME: node a keeps its own 'ib0'; the controller has 'eth0'"
    ]
    assert network_environment("10.9.0.5", "ib0", "ib0") == {
        "VLLM_HOST_IP": "10.9.0.5",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }
    assert network_environment("10.0.0.5", None, None) == {"VLLM_HOST_IP": "10.0.0.5"}


GPUS = {"CPU": 64.0, "GPU": 8.0}
NONE = {"CPU": 64.0}


@pytest.mark.parametrize(
    ("device", "nodes", "chosen"),
    [
        ("auto", [NONE, GPUS, GPUS], "cuda"),
        ("cuda", [NONE, GPUS, GPUS], "cuda"),
        ("cpu", [GPUS, GPUS], "cpu"),
        ("auto", [NONE, NONE], "cpu"),
        ("cuda", [NONE, NONE], None),
        ("auto", [NONE, GPUS], None),
        ("auto", [GPUS, {"CPU": 64.0, "GPU": 4.0}], None),
    ],
)
def test_the_device_of_a_joined_cluster_is_that_of_its_nodes(device, nodes, chosen):
    cluster = ClusterConfig(device=device, nnodes=2, n_gpus_per_node=8)
    if chosen is not None:
        assert device_of_nodes(cluster, nodes) == chosen
        return
    with pytest.raises(ClusterError, match=rf"cluster\.device: '{device}' -- 2 node\(s\) with 8 GPUs each"):
        device_of_nodes(cluster, nodes)


def test_a_joined_cluster_decides_the_device_and_is_left_again(monkeypatch, caplog):
    users: list[int] = []
    nodes = [NONE, GPUS]
    monkeypatch.setattr(ray_runtime, "acquire", lambda cluster, device: users.append(1))
    monkeypatch.setattr(ray_runtime, "release", lambda: users.pop())
    monkeypatch.setattr(ray_runtime, "node_resources", lambda: nodes if users else [])
    cluster = ClusterConfig(ray_address="head:6379", n_gpus_per_node=8)
    with ray_runtime.joined(cluster):
        assert len(users) == 1
        assert ray_runtime.workers_device(cluster, "auto") == "cuda" == ray_runtime.workers_device(cluster, "cuda")
        assert ray_runtime.workers_device(cluster, "cpu") == "cpu" and not caplog.text
        nodes.pop()
        assert ray_runtime.workers_device(cluster, "auto") == "cpu"
        assert "no node of the Ray cluster has a GPU: the ranks run on CPU" in caplog.text, "never without a word"
        with pytest.raises(ClusterError, match=r"cluster\.device: 'cuda'"):
            ray_runtime.workers_device(cluster, "cuda")
    assert users == []
    with ray_runtime.joined(ClusterConfig()):
        assert users == [], "a run with a Ray of its own joins nothing"


def test_ranks_are_numbered_by_where_their_nodes_are():
    placement = plan_placement(ClusterConfig(nnodes=4, n_gpus_per_node=2), "cpu")
    ips = ["10.0.0.10", "10.0.0.9", "10.0.0.2", "10.0.0.1"]
    assert in_order(placement, ["", "", "", ""], ips).bundle_of_rank == (3, 3, 2, 2, 1, 1, 0, 0)
    hints = ["top.leaf10.a", "top.leaf9.b", "top.leaf9.a", "top.leaf10.b"]
    assert in_order(placement, hints, ips).bundle_of_rank == (2, 2, 1, 1, 0, 0, 3, 3)
    one = plan_placement(ClusterConfig(n_gpus_per_node=4), "cpu")
    assert in_order(one, [""] * 4, ips) == one


def test_the_table_of_ranks():
    rows = [("gpu1", "10.0.0.1", "0", "tp 0 dp 0"), ("gpu10", "10.0.0.10", "7", "")]
    assert placement_table(rows).splitlines() == [
        "rank  node   address    gpu  place",
        "0     gpu1   10.0.0.1   0    tp 0 dp 0",
        "1     gpu10  10.0.0.10  7",
    ]


def test_a_held_port_is_the_store_of_its_process_and_nobody_elses():
    """As a rank does: it holds the port from before the others hear of it until torch's store listens there."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    with held_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        held.close()
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port, 1, is_master=False).get("key") == b"value"


def test_ports():
    port = free_port()
    assert not port_in_use(port)
    with socket.socket() as server:
        server.bind(("", port))
        server.listen()
        assert port_in_use(port)


def test_cuda_without_a_gpu_is_an_error_and_auto_is_not():
    import torch

    if torch.cuda.is_available():
        assert resolve_device("auto") == "cuda" == resolve_device("cuda")
    else:
        assert resolve_device("auto") == "cpu"
        with pytest.raises(ClusterError, match=r"cluster\.device: 'cuda' -- torch sees no GPU here"):
            resolve_device("cuda")
    assert resolve_device("cpu") == "cpu"


class Composed:
    """A worker made of another one."""

    inner: Worker
    count: int

    def __init__(self, rank: int, world: int, word: str) -> None:
        self.inner = Worker(rank, world, word)
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def test_a_component_is_called_by_its_own_class():
    with start_group(Composed, ("hey",), INLINE, RankGrid.flat(1), "cpu") as group:
        assert group.each_dp(Worker.shout, ["you"]) == ["hey you!"]
        # A type checker sees a method's own types through the group.
        first, every = group.rank0(Composed.add, 2), group.all(Composed.add, number=3)
        assert_type(first, int)
        assert_type(every, list[int])
        assert_type(group.each_dp(Worker.shout, ["you"]), list[str])
        assert (first, every) == (2, [5])
        assert group.last_seconds.keys() == {"inner.shout", "add"}
        with pytest.raises(DataError) as caught:
            group.all(Worker.fail)
        assert "on rank 0 in Composed.inner.fail" in caught.value.__notes__


def test_a_method_of_another_class_is_refused_with_what_the_workers_are_made_of():
    class Stranger:
        def shout(self, text: str) -> str:
            return text

    refused = pytest.raises(ClusterError, match=r"Stranger\.shout is no method .* made of: Composed, Worker")
    with start_group(Composed, ("hey",), INLINE, RankGrid.flat(1), "cpu") as group, refused:
        group.each_dp(Stranger.shout, ["you"])


def test_two_groups_do_not_wait_for_each_other():
    """What disaggregated engines need: a call on their ranks runs while the trainers' ranks are at work."""
    with inline_group() as trainers, inline_group() as engines:
        trainers._lock.acquire()
        try:
            assert engines.each_dp(Worker.shout, ["you"]) == ["hey you!"]
        finally:
            trainers._lock.release()
