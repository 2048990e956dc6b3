"""Nodes with addresses of their own on one machine: network namespaces, joined by a cable that can be cut.

Each node has its own name as well, which leads to 127.0.1.1 there, as Debian writes it into /etc/hosts.
Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEARCHED = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
NODES = {"n1": ("10.78.0.1", "fd78::1"), "n2": ("10.78.0.2", "fd78::2")}

# RL_SSH of launch/ray_cluster.sh: enters the node named by the first argument and runs the rest there. Each node has a
# value of its own of a variable that NCCL does not know, and the second one comes first in the network.
ENTER = """#!/bin/sh
node=$1
shift
exec ip netns exec {prefix}-"$node" unshare --uts --mount sh -ec \\
  'hostname "$0"; mount --bind {folder}/hosts-"$0" /etc/hosts; exec "$@"' \\
  "$node" env NCCL_OWN="$node" RL_TOPOLOGY="leaf$((3 - ${{node#n}}))" "$@"
"""


def why_not() -> str | None:
    """What this machine lacks for such nodes, in words; None if it can have them."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "unshare") if shutil.which(name, path=SEARCHED) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2 util-linux)"
    probe = f"rl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, env=environment())
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCHED}


@dataclass(frozen=True)
class TwoNodes:
    """folder: the program that enters a node, and the nodes' tables of names."""

    folder: Path
    prefix: str
    ipv4: bool

    @property
    def ssh(self) -> str:
        """What RL_SSH is set to."""
        return f"sh {self.folder}/enter"

    def cut(self) -> None:
        """Take the cable out."""
        _ip("-n", f"{self.prefix}-n2", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Put the cable back in. An interface that was down has lost its IPv6 address."""
        _ip("-n", f"{self.prefix}-n2", "link", "set", "eth0", "up")
        _ip("-n", f"{self.prefix}-n2", "-6", "address", "replace", f"{NODES['n2'][1]}/64", "dev", "eth0", "nodad")

    def pids(self) -> list[int]:
        """Processes on the nodes."""
        return [int(pid) for node in NODES for pid in _ip("netns", "pids", f"{self.prefix}-{node}").split()]

    def command_lines(self) -> list[str]:
        """Of the processes on the nodes."""
        lines: list[str] = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return lines

    def connect(self) -> None:
        names = [f"{self.prefix}-{node}" for node in NODES]
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, (node, (ipv4, ipv6)) in zip(names, NODES.items(), strict=True):
            if self.ipv4:
                _ip("-n", name, "address", "add", f"{ipv4}/24", "dev", "eth0")
            _ip("-n", name, "-6", "address", "add", f"{ipv6}/64", "dev", "eth0", "nodad")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            (self.folder / f"hosts-{node}").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {node}\n")
        (self.folder / "enter").write_text(ENTER.format(prefix=self.prefix, folder=self.folder))

    def remove(self) -> None:
        """Take the nodes away, with what still runs there."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in NODES:
            _ip("netns", "delete", f"{self.prefix}-{node}")


@contextlib.contextmanager
def two_nodes(ipv4: bool = True) -> Iterator[TwoNodes]:
    """Two nodes for the block, with addresses of both kinds or of IPv6 alone."""
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp") as folder:
        nodes = TwoNodes(Path(folder), f"rl-{os.getpid()}-{'4' if ipv4 else '6'}", ipv4)
        try:
            nodes.connect()
            yield nodes
        finally:
            nodes.remove()


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, env=environment())
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
