"""After a fault: waits until a Ray cluster that the run joins has as many nodes again as the run needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from megatron_rl.cluster import readiness
from megatron_rl.cluster.addresses import ray_address
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError


def wait_for_nodes(cluster: ClusterConfig, say: Callable[[str], None]) -> None:
    """Nothing if the run starts a Ray of its own: its one node is here. ClusterError with what is there, once
    cluster.start_timeout_s are over.
    """
    address = ray_address(cluster)
    if address is None:
        return
    say(f"waiting for {cluster.nnodes} node(s) at {address}, for at most {cluster.start_timeout_s:g} s")
    # A process of its own: Ray's library ends the process that asks a head in vain. GPUs come with their nodes.
    command = [
        sys.executable,
        "-m",
        readiness.__name__,
        address,
        str(cluster.nnodes),
        "0",
        f"{cluster.start_timeout_s:g}",
    ]
    asked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if asked.returncode != 0:
        lines = asked.stdout.strip().splitlines() or [f"the question ended with code {asked.returncode}"]
        raise ClusterError(f"the run cannot go on: {lines[-1].removeprefix('[wait] ')}")
