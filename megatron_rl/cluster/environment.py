"""Environment variables of worker processes, and of a controller that uses Ray."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping

from megatron_rl.config.sections.cluster import ClusterConfig

PASSED_PREFIXES = (
    *("VLLM_", "NCCL_", "OMP_", "GLOO_", "TORCH", "PYTORCH_", "HF_", "TOKENIZERS_", "TRITON_", "CUDA_", "CUBLAS_"),
    *("UCX_", "UCC_", "FI_", "OFI_", "NVSHMEM_", "MKL_", "KMP_"),
)
"""What the controller's environment says under these prefixes holds for workers on every node whose own environment
does not say otherwise."""
PASSED_NAMES = ("LD_LIBRARY_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
OWN_NAMES = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP")
"""Never passed: they say something of the controller's node alone."""
ZERO_COPY = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""Ray sends torch tensors as it sends numpy arrays: as bytes that the receiver reads where they lie (60 GB/s, where
torch's own pickle makes 1). A received tensor is read-only, though torch does not say so: nothing may write to it."""


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go from a controller to its workers."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(PASSED_PREFIXES) or name in PASSED_NAMES) and name not in OWN_NAMES
    }


def differences(controller: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each variable that a node has in another value than the controller. nodes: host -> its variables."""
    values = passed(controller)
    return [
        f"{name}: node {host} keeps its own {own[name]!r}; the controller has {values[name]!r}"
        for host, own in nodes.items()
        for name in sorted(values.keys() & own.keys())
        if own[name] != values[name]
    ]


def worker_environment(
    cluster: ClusterConfig, device: str, controller: Mapping[str, str], node: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables of the ranks of one node; they must be set before the process starts.

    device: "cpu" or "cuda". controller: the controller's environment, which overrides the defaults. node: what the
    node's own environment says, which overrides both: names of interfaces and folders may differ from node to node.
    """
    values = ZERO_COPY | {
        "OMP_NUM_THREADS": str(max(1, int(cluster.num_cpus_per_rank))),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        # Compiling small functions costs more than they ever save there.
        values |= {"TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1"}
    else:
        # Megatron-Core orders tensor-parallel collectives by a single queue on GPUs before Blackwell.
        # FlashInfer's sampler is built at run time; vLLM's own needs no compiler.
        values |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    values |= passed(controller) | passed(node or {})
    # The engine shares the worker's weights, so it lives in the worker's process whatever the controller's
    # shell says.
    values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return values


def network_environment(ip: str, interface: str | None, wanted: str | None) -> dict[str, str]:
    """Variables that bind a node's ranks to its address. Where the name of the host leads does not matter then.

    wanted: cluster.network_interface; without it NCCL chooses by itself, which finds the fast network.
    """
    values = {"VLLM_HOST_IP": ip}
    if interface is not None:
        values["GLOO_SOCKET_IFNAME"] = interface
    if wanted is not None:
        values["NCCL_SOCKET_IFNAME"] = f"={wanted}"
    return values


def rank_environment(
    rank: int, world: int, local_rank: int, local_world: int, master_addr: str, master_port: int
) -> dict[str, str]:
    """Variables of one rank, named as torchrun names them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def accept_read_only_tensors() -> None:
    """Stop the warnings of Ray and torch, one each a process, that received tensors must not be written to. Called once
    Ray is imported.
    """
    warnings.filterwarnings("ignore", message="Zero-copy tensor serialization is enabled")
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def held_port() -> socket.socket:
    """A TCP port of this node, kept from other processes until the socket is closed; a server of this one may listen
    there all the same. Linux lets two sockets have a port if both allow it and one alone listens.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    return held


def free_port() -> int:
    """A TCP port that nothing on this node listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def port_in_use(port: int) -> bool:
    """Whether something on this node already has the TCP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do; without it a port whose last connection has just closed would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
