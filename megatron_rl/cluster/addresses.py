"""Which network interface and address of a node the others reach it at. Light: `launch/ray_node.sh` asks it too.

python -m megatron_rl.cluster.addresses [host:port of the head]      prints this node's address
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError

Interfaces = Mapping[str, Sequence[str]]
"""Interface -> its addresses, IPv4 first; link-local ones are left out."""


@dataclass(frozen=True)
class NodeAddress:
    """Where the other nodes reach a node."""

    ip: str
    interface: str | None
    """None if no interface of the node has the address (a container behind address translation)."""


def own_interfaces() -> dict[str, list[str]]:
    """The interfaces of this node that have an address."""
    interfaces: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ips = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = sorted((ip for ip in ips if not _is_link_local(ip)), key=_version)
        if usable:
            interfaces[name] = usable
    return interfaces


def choose_address(
    interfaces: Interfaces, ray_ip: str, environ: Mapping[str, str], wanted: str | None = None
) -> NodeAddress:
    """The interface named by `wanted` (cluster.network_interface), else by GLOO_SOCKET_IFNAME, else by
    NCCL_SOCKET_IFNAME, else the one that has the node's address in Ray. ClusterError if a name fits no interface.
    """
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME"), environ.get("NCCL_SOCKET_IFNAME")
    if wanted:
        name, value, matches = "cluster.network_interface", wanted, [wanted]
    elif gloo:
        name, value, matches = "GLOO_SOCKET_IFNAME", gloo, gloo.split(",")
    elif nccl:
        name, value, matches = "NCCL_SOCKET_IFNAME", nccl, nccl_matches(nccl, interfaces)
    else:
        return NodeAddress(ray_ip, next((each for each, ips in interfaces.items() if ray_ip in ips), None))
    matches = [each for each in matches if each in interfaces]
    if not matches:
        there = ", ".join(f"{each} ({ips[0]})" for each, ips in interfaces.items())
        raise ClusterError(
            f"{name}: {value!r} -- fits no interface with an address on node {os.uname().nodename}, which has "
            f"{there} -- name one of them, or leave it out"
        )
    interface = next((each for each in matches if ray_ip in interfaces[each]), matches[0])
    return NodeAddress(_best(interfaces[interface], ray_ip), interface)


def nccl_matches(pattern: str, interfaces: Interfaces) -> list[str]:
    """Interfaces that a value of NCCL_SOCKET_IFNAME allows: prefixes, "=" before exact names, "^" before those to
    leave out. Loopback interfaces are taken only if they are named.
    """
    sign, names = pattern[:1], pattern.lstrip("^=").split(",")
    if sign == "^":
        without = pattern.lstrip("^").lstrip("=").split(",")
        exact = pattern.startswith("^=")
        return [each for each in interfaces if each != "lo" and not any(_fits(each, name, exact) for name in without)]
    # In the order of the names: the first is the one that is liked best.
    return [each for name in names for each in interfaces if _fits(each, name, sign == "=")]


def route_address(toward: str | None = None) -> str:
    """This node's address on the way to host:port (or to the rest of the world). No packet is sent.

    OSError if there is no way there; the loopback address if there is no way out and nothing was named.
    """
    if toward is not None:
        host, port = split_address(toward)
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        return _route(family, place)
    for family, place in ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9))):
        try:
            return _route(family, place)
        except OSError:
            continue
    others = [ips[0] for name, ips in own_interfaces().items() if name != "lo"]
    return others[0] if others else "127.0.0.1"


def ray_address(cluster: ClusterConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """The Ray cluster to join: cluster.ray_address, else RAY_ADDRESS, which Ray sets inside a job of `ray job submit`.

    None if the run starts a Ray of its own, which cluster.ray_port asks for as well.
    """
    if cluster.backend != "ray" or cluster.ray_port:
        return None
    address = cluster.ray_address or environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def split_address(address: str) -> tuple[str, int]:
    """host:port or [host]:port -> (host, port). ClusterError if it is neither."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ClusterError(f"{address!r} -- is no address -- write host:port, or [host]:port for IPv6")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _route(family: int, place: tuple[object, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def _best(ips: Sequence[str], ray_ip: str) -> str:
    """Ray's own address if it is among them, else the first of its kind (IPv4 or IPv6), else the first."""
    if ray_ip in ips:
        return ray_ip
    return next((ip for ip in ips if _version(ip) == _version(ray_ip)), ips[0])


def _fits(interface: str, name: str, exact: bool) -> bool:
    return interface == name if exact else bool(name) and interface.startswith(name)


def _version(ip: str) -> int:
    return ipaddress.ip_address(ip.partition("%")[0]).version


def _is_link_local(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_link_local


def main(arguments: Sequence[str]) -> None:
    """Print this node's address; see the module."""
    try:
        toward = route_address(arguments[0] if arguments else None)
        print(choose_address(own_interfaces(), toward, os.environ).ip)
    except (ClusterError, OSError) as error:
        sys.exit(f"[addresses] {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
