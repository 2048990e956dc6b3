"""Waiting for the nodes of a Ray cluster."""

from __future__ import annotations

import socket

import pytest

from megatron_rl.cluster import readiness
from megatron_rl.cluster.readiness import LiveNode, main, missing, wait_until_ready
from megatron_rl.errors import ClusterError

HEAD, WORKER = LiveNode("10.0.0.1", "a", 64, 8), LiveNode("10.0.0.2", "b", 64, 8)


def test_what_a_cluster_lacks():
    assert missing([HEAD, WORKER], 2, 16) is None
    assert missing([HEAD], 2, 16) == "1 of 2 nodes, 8 of 16 GPUs"
    assert missing([HEAD, WORKER], 2, 24) == "2 of 2 nodes, 16 of 24 GPUs"


def test_the_wait_ends_with_the_last_node(monkeypatch):
    answers = [[], [HEAD], [HEAD, WORKER]]
    monkeypatch.setattr(readiness, "POLL_S", 0.0)
    monkeypatch.setattr(readiness, "_listens", lambda host, port: True)
    monkeypatch.setattr(readiness, "ask_nodes", lambda address: answers.pop(0))
    said: list[str] = []
    assert wait_until_ready("10.0.0.1:6379", 2, 16, 60, said.append) == [HEAD, WORKER]
    assert [line.partition(" at ")[0] for line in said] == ["0 of 2 nodes, 0 of 16 GPUs", "1 of 2 nodes, 8 of 16 GPUs"]


def test_the_deadline_says_what_is_there(monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(SystemExit, match="is not complete after 0 s: no answer"):
            main([address, "2", "16", "0"])
        monkeypatch.setattr(readiness, "_listens", lambda host, port: True)
        monkeypatch.setattr(readiness, "ask_nodes", lambda address: [HEAD])
        with pytest.raises(ClusterError, match=r"1 of 2 nodes, 8 of 16 GPUs \(nodes there: a 10.0.0.1 with 8 GPUs\)"):
            wait_until_ready(address, 2, 16, 0, print)
        main([address, "1", "8", "0"])
    assert "1 nodes and 8 GPUs at " in capsys.readouterr().out
