"""Section `cluster`: which processes, on which machines."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import section


@section
class ClusterConfig:
    backend: Literal["ray", "inline"] = "ray"
    """ray places worker processes; inline runs one rank in this process (for a debugger)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where a GPU is visible."""
    nnodes: PositiveInt = 1
    """Machines."""
    n_gpus_per_node: PositiveInt = 1
    """Ranks per node: GPUs, or processes on CPU."""
    ray_address: str | None = None
    """Address of a running Ray cluster; a local one is started when not given."""
    ray_port: NonNegativeInt | None = None
    """Port of the local Ray's head; Ray picks a free one when not given. In use: an error."""
    num_cpus_per_rank: PositiveFloat = 1.0
    """CPU cores that Ray reserves for each rank."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for all ranks to start, load weights and build their engines."""
    step_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one call on the workers; past it the run stops and names the call and the rank."""
