"""Which interface a node is reached at."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from megatron_rl.cluster import addresses
from megatron_rl.cluster.addresses import (
    NodeAddress,
    choose_address,
    join_address,
    main,
    nccl_matches,
    own_interfaces,
    ray_address,
    route_address,
    split_address,
)
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError

NODE = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.5", "fd00::5"],
    "ib0": ["10.9.0.5"],
    "ib1": ["10.9.1.5"],
}


@pytest.mark.parametrize(
    ("ray_ip", "environ", "wanted", "expected"),
    [
        ("10.0.0.5", {}, None, NodeAddress("10.0.0.5", "eth0")),
        ("fd00::5", {}, None, NodeAddress("fd00::5", "eth0")),
        ("192.0.2.7", {}, None, NodeAddress("192.0.2.7", None)),
        ("10.0.0.5", {}, "ib1", NodeAddress("10.9.1.5", "ib1")),
        ("10.0.0.5", {"GLOO_SOCKET_IFNAME": "ib0"}, None, NodeAddress("10.9.0.5", "ib0")),
        ("10.0.0.5", {"GLOO_SOCKET_IFNAME": "gone,ib1"}, None, NodeAddress("10.9.1.5", "ib1")),
        ("10.0.0.5", {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib"}, None, NodeAddress("10.0.0.5", "eth0")),
        ("10.0.0.5", {"NCCL_SOCKET_IFNAME": "ib"}, None, NodeAddress("10.9.0.5", "ib0")),
        # One that Ray uses is taken before others that the name fits as well.
        ("10.9.1.5", {"NCCL_SOCKET_IFNAME": "ib"}, None, NodeAddress("10.9.1.5", "ib1")),
        ("10.0.0.5", {"NCCL_SOCKET_IFNAME": "^docker,eth"}, None, NodeAddress("10.9.0.5", "ib0")),
        ("10.0.0.5", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib1", NodeAddress("10.9.1.5", "ib1")),
        # Of an interface's addresses, one of the kind that Ray uses.
        ("fd00::9", {}, "eth0", NodeAddress("fd00::5", "eth0")),
    ],
)
def test_the_interface_of_a_node(ray_ip, environ, wanted, expected):
    assert choose_address(NODE, ray_ip, environ, wanted) == expected


@pytest.mark.parametrize(
    ("environ", "wanted", "key"),
    [
        ({}, "ib9", "cluster.network_interface: 'ib9'"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, None, "GLOO_SOCKET_IFNAME: 'eth1'"),
        ({"NCCL_SOCKET_IFNAME": "=ib"}, None, "NCCL_SOCKET_IFNAME: '=ib'"),
    ],
)
def test_a_name_that_fits_no_interface(environ, wanted, key):
    with pytest.raises(ClusterError) as caught:
        choose_address(NODE, "10.0.0.5", environ, wanted)
    assert str(caught.value).startswith(key) and "eth0 (10.0.0.5)" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("ib", ["ib0", "ib1"]),
        ("=ib0", ["ib0"]),
        ("ib1,eth", ["ib1", "eth0"]),
        ("^ib", ["docker0", "eth0"]),
        ("^=ib0,docker0", ["eth0", "ib1"]),
        ("lo", ["lo"]),
    ],
)
def test_the_names_that_nccl_takes(pattern, expected):
    assert nccl_matches(pattern, NODE) == expected


def test_the_ray_that_a_run_joins():
    plain, keyed = ClusterConfig(), ClusterConfig(ray_address="key:1")
    assert ray_address(plain, {}) is None
    assert ray_address(plain, {"RAY_ADDRESS": "head:6379"}) == "head:6379"
    assert ray_address(keyed, {"RAY_ADDRESS": "head:6379"}) == "key:1"
    assert ray_address(plain, {"RAY_ADDRESS": "local"}) is None
    for own in (ClusterConfig(ray_port=6379), ClusterConfig(backend="inline")):
        assert ray_address(own, {"RAY_ADDRESS": "head:6379"}) is None


def test_addresses_are_cut_and_joined():
    for text, host, port in (("10.0.0.5:6379", "10.0.0.5", 6379), ("[fd00::5]:80", "fd00::5", 80), ("a.b:1", "a.b", 1)):
        assert split_address(text) == (host, port) and join_address(host, port) == text
    for wrong in ("10.0.0.5", "fd00::5:80", ":80", "host:x", "host:70000"):
        with pytest.raises(ClusterError, match=r"write host:port, or \[host\]:port"):
            split_address(wrong)


def test_the_way_to_an_address(monkeypatch, capsys):
    assert "127.0.0.1" in own_interfaces()["lo"]
    assert route_address("127.0.0.1:80") == "127.0.0.1"
    main(["127.0.0.1:80"])
    assert capsys.readouterr().out == "127.0.0.1\n"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(SystemExit, match="GLOO_SOCKET_IFNAME: 'nosuch0'"):
        main([])


def test_a_machine_without_a_way_out(monkeypatch):
    def unreachable(family: int, place: tuple[object, ...]) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(addresses, "_route", unreachable)
    monkeypatch.setattr(addresses, "own_interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]})
    assert route_address() == "10.0.0.5"
    monkeypatch.setattr(addresses, "own_interfaces", lambda: {"lo": ["127.0.0.1"]})
    assert route_address() == "127.0.0.1"


def test_link_local_addresses_are_no_addresses_of_a_node(monkeypatch):
    def of(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    ips = [of(socket.AF_INET6, "fe80::1%eth0"), of(socket.AF_INET6, "fd00::5"), of(socket.AF_INET, "10.0.0.5")]
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {"eth0": ips, "eth1": ips[:1]})
    assert own_interfaces() == {"eth0": ["10.0.0.5", "fd00::5"]}
