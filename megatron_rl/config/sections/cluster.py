"""Section `cluster`: which processes, on which machines."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import section


@section
class ClusterConfig:
    backend: Literal["ray", "inline"] = "ray"
    """ray starts worker processes; inline runs one rank in this process (for a debugger)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; auto is cuda if a GPU is visible."""
    nnodes: PositiveInt = 1
    """Number of nodes."""
    n_gpus_per_node: PositiveInt = 1
    """Ranks per node: GPUs, or processes on CPU."""
    tp_across_nodes: bool = False
    """Whether tensor-parallel groups (actor.tp, actor.etp, rollout.tp) may lie on several nodes: their traffic is then
    bound by the network."""
    network_interface: str | None = None
    """Network interface that the ranks of different nodes use, such as ib0, the same on every node. If unset:
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME of each node, else the one of the node's address in Ray."""
    ray_address: str | None = None
    """Address of a running Ray cluster. If unset, that of RAY_ADDRESS; without both, a local one is started."""
    ray_port: NonNegativeInt | None = None
    """Port of the local Ray head node; a free one if unset. A port in use is an error."""
    num_cpus_per_rank: PositiveFloat = 1.0
    """CPU cores that Ray reserves per rank."""
    cache_dir: str | None = None
    """Folder on each node for kernels and graphs that ranks compile, kept for later runs; may begin with ~. If unset:
    megatron_rl in $XDG_CACHE_HOME, or in ~/.cache. Variables of libraries, such as VLLM_CACHE_ROOT, go before it."""
    check_links: bool | None = None
    """Whether ranks measure the speed of their links before workers are built (some seconds; not on the inline
    backend). Unset: where nnodes is above 1."""
    expected_gbps: PositiveFloat | None = None
    """Gbit/s that a link between two nodes must have, of each GPU while all send at once. A slower one is refused; far
    below the median always is."""
    start_timeout_s: PositiveFloat = 600.0
    """Timeout for all ranks to start, load weights and build their engines, in seconds."""
    hang_timeout_s: PositiveFloat = 300.0
    """Seconds without a sign of progress (a micro-batch, an engine step, a tensor of a save) from any rank that a call
    waits for, until the run stops with the stacks of the ranks that hang. Not on the inline backend."""
    step_timeout_s: PositiveFloat = 3600.0
    """Timeout of one call on the workers, in seconds; the run then stops and names the call and the rank."""

    @property
    def measures_links(self) -> bool:
        """check_links, as it is meant."""
        return self.nnodes > 1 if self.check_links is None else self.check_links
