"""Verdicts on nodes and links, from facts that are made up; and the facts of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.cluster import nodecheck_facts, nodecheck_reach
from megatron_rl.cluster.nodecheck import (
    Clock,
    GpuFacts,
    NodeFault,
    NodeHealth,
    Wanted,
    labels,
    link_faults,
    node_faults,
    node_notes,
    one_line,
    rows,
    suspects,
    table,
    version_faults,
)
from megatron_rl.cluster.nodecheck_facts import code_digest, collect, digest, read_gpus
from megatron_rl.cluster.nodecheck_run import NodeCheck, Ranks, check_nodes, judge_links
from megatron_rl.errors import ClusterError
from megatron_rl.parallel.links import Link, LinkPlan, Measured, meetings, pairings

GIB = 2**30
VERSIONS = {"megatron_rl": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0", "code": "abc"}
GPU = GpuFacts(0, "NVIDIA H200", 141 * GIB, 0, 0)
NODE = NodeHealth("node-a", VERSIONS, 96, 500 * GIB, "/tmp", 50 * GIB, 65536, (GPU, replace(GPU, index=1)))
WANTED = Wanted(ranks_a_node=2, with_gpus=True, open_files=1024, token=None)
IN_STEP = Clock(0.001, 0.002)


def faults_of(
    node: NodeHealth, clock: Clock = IN_STEP, driver: NodeHealth = NODE, wanted: Wanted = WANTED
) -> list[str]:
    """ "check -- reason" of each fault of one node that runs alone."""
    faults = node_faults([node.host], [node], [clock], driver, wanted)
    assert all(fault.host == node.host and fault.cure for fault in faults)
    return [f"{fault.check} -- {fault.reason}" for fault in faults]


def test_a_healthy_node_has_no_fault() -> None:
    assert faults_of(NODE) == []


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        (replace(NODE, memory_free=GIB // 2), "memory -- 0.5 GiB free"),
        (replace(NODE, temporary_free=0), "disk -- 0.0 GiB free in /tmp"),
        (replace(NODE, open_files=1000), "open files -- a process may open 1000"),
        (replace(NODE, gpus=(GPU,)), "GPUs -- nvidia-smi lists 1, and 2 ranks run there"),
        (replace(NODE, gpus=(), gpu_trouble="nvidia-smi fails: NVML"), "GPUs -- nvidia-smi fails: NVML"),
        (replace(NODE, gpus=(GPU, replace(GPU, index=1, ecc_errors=3))), "GPU 1 -- 3 uncorrected memory errors"),
        (replace(NODE, gpus=(replace(GPU, bad_rows=True), GPU)), "GPU 0 -- rows of its memory"),
        (replace(NODE, gpus=(replace(GPU, slowdowns=("heat",)), GPU)), "GPU 0 -- its clocks are held down by heat"),
        (replace(NODE, folders={"/m": None}), "/m -- is not there"),
    ],
)
def test_what_a_node_lacks_is_named(node: NodeHealth, fault: str) -> None:
    (text,) = faults_of(node)
    assert text.startswith(fault)


def test_limits_are_reached_and_not_passed() -> None:
    assert faults_of(replace(NODE, memory_free=GIB, temporary_free=GIB, open_files=1024)) == []
    assert faults_of(replace(NODE, open_files=None)) == []


def test_without_gpus_their_state_is_not_asked() -> None:
    bare = replace(NODE, gpus=(), gpu_trouble="nvidia-smi fails")
    assert faults_of(bare, wanted=replace(WANTED, with_gpus=False)) == []
    assert faults_of(replace(NODE, gpus=None)) == []
    assert "no nvidia-smi" in node_notes(["node-a"], [replace(NODE, gpus=None)], WANTED)[0]


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        (Clock(1.9, 0.0), None),
        (Clock(2.4, 0.5), None),  # it may be 1.9 s
        (Clock(2.6, 0.5), "2.6 s ahead of"),
        (Clock(-86400.0, 0.5), "86400.0 s behind"),
    ],
)
def test_a_clock_is_judged_by_what_is_known_of_it(clock: Clock, text: str | None) -> None:
    faults = faults_of(NODE, clock)
    assert (faults == []) if text is None else text in faults[0]


def test_the_node_that_differs_is_named_and_not_the_others() -> None:
    odd = replace(NODE, host="node-c", versions=VERSIONS | {"torch": "2.9.0"})
    lacking = replace(NODE, host="node-d", versions={k: v for k, v in VERSIONS.items() if k != "ray"})
    faults = version_faults(["a", "b", "c", "d"], [NODE, NODE, odd, lacking], NODE)
    assert [(fault.host, fault.check) for fault in faults] == [("c", "version of torch"), ("d", "version of ray")]
    assert faults[0].reason == "2.9.0, where 3 of 4 nodes have 2.13.0"
    assert faults[1].reason == "not installed, where 3 of 4 nodes have 2.60.0"


def test_of_two_nodes_the_one_unlike_the_controller_is_named() -> None:
    odd = replace(NODE, versions=VERSIONS | {"torch": "2.9.0"})
    assert [fault.host for fault in version_faults(["a", "b"], [odd, NODE], NODE)] == ["a"]
    assert [fault.host for fault in version_faults(["a", "b"], [NODE, odd], NODE)] == ["b"]


def test_the_controller_may_have_another_torch_and_no_other_code() -> None:
    driver = replace(NODE, host="login", versions=VERSIONS | {"torch": "2.13.0+cpu"})
    assert version_faults(["a"], [NODE], driver) == []
    driver = replace(driver, versions=VERSIONS | {"code": "old"})
    (fault,) = version_faults(["a"], [NODE], driver)
    assert (fault.host, fault.check) == ("login", "version of code of the controller")


def test_paths_are_compared_with_the_controllers() -> None:
    driver = replace(NODE, folders={"/model": "1", "/other": None})
    here = replace(NODE, folders={"/model": "1", "/only here": "9"})
    assert faults_of(here, driver=driver) == []
    (text,) = faults_of(replace(NODE, folders={"/model": "2"}), driver=driver)
    assert text.startswith("/model -- holds other files")


def test_a_run_folder_that_is_not_shared_is_named() -> None:
    wanted = replace(WANTED, token="new")
    assert faults_of(replace(NODE, token="new"), wanted=wanted) == []
    for token in (None, "old"):
        (text,) = faults_of(replace(NODE, token=token), wanted=wanted)
        assert text.startswith("run folder -- does not see the file")


def test_all_faults_of_all_nodes_come_at_once() -> None:
    bad = replace(NODE, host="node-b", memory_free=0, temporary_free=0, versions=VERSIONS | {"ray": "1"}, gpus=())
    faults = node_faults(["a", "b"], [NODE, bad], [IN_STEP, Clock(9.0, 0.0)], NODE, WANTED)
    assert {fault.host for fault in faults} == {"b"}
    assert {fault.check for fault in faults} == {"version of ray", "clock", "memory", "disk", "GPUs"}


def test_notes_stop_nothing() -> None:
    other = replace(NODE, host="node-b", gpus=(replace(GPU, name="NVIDIA H100"), replace(GPU, index=1, used=40 * GIB)))
    notes = node_notes(["a", "b"], [NODE, other], WANTED)
    assert notes == [
        "b: GPU 1 has 40.0 GiB in use by other processes",
        "GPUs of different kinds: 3 x NVIDIA H200, 1 x NVIDIA H100: the slowest sets the pace",
    ]
    assert node_faults(["b"], [other], [IN_STEP], NODE, WANTED) == []


# Links.


def between(*speeds: float | None) -> tuple[list[Link], list[str]]:
    """A ring of nodes with one rank each."""
    count = len(speeds)
    links = [
        Link("between", (at, (at + 1) % count), speed, "" if speed else "it hangs") for at, speed in enumerate(speeds)
    ]
    return links, [f"n{at}" for at in range(count)]


def test_a_link_far_below_the_median_is_named_by_both_hosts() -> None:
    links, names = between(380, 390, 120, 400, 395)
    (fault,) = link_faults(links, names, None)
    assert (fault.host, fault.check) == ("n2 rank 2 - n3 rank 3", "link between nodes")
    assert fault.reason == "120 Gbit/s, where the median is 390"
    assert link_faults(*between(380, 390, 200, 400, 395), None) == []


def test_a_link_below_what_is_expected_is_named_though_all_are() -> None:
    links, names = between(90, 95, 92)
    assert link_faults(links, names, 90) == []
    assert len(link_faults(links, names, 91)) == 1
    assert next(fault.reason for fault in link_faults(links, names, 200)) == (
        "90 Gbit/s, where the median is 92; expected: 200"
    )


def test_what_is_expected_between_nodes_says_nothing_of_links_within() -> None:
    links = [Link("within", (0, 1), 30.0)]
    assert link_faults(links, ["a", "a"], 400) == []


def test_kinds_of_links_have_medians_of_their_own() -> None:
    links = [Link("within", (0, 1), 3000.0), Link("within", (2, 3), 2900.0), Link("between", (0, 2), 300.0)]
    assert link_faults(links, ["a", "a", "b", "b"], None) == []
    (fault,) = link_faults([*links, Link("within", (4, 5), 200.0)], ["a", "a", "b", "b", "c", "c"], None)
    assert (fault.host, fault.check) == ("c rank 4 - c rank 5", "link within the node")


def test_a_link_that_does_not_answer_is_named_with_its_reason() -> None:
    links, names = between(380, None, 390)
    (fault,) = link_faults(links, names, None)
    assert (fault.host, fault.reason) == ("n1 rank 1 - n2 rank 2", "it hangs")


def test_a_node_all_of_whose_links_are_slow_is_the_suspect() -> None:
    links = [
        Link("between", pair, 30.0 if 2 in pair else 380.0) for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    ]
    names = ["a", "b", "c", "d"]
    faults = link_faults(links, names, None)
    assert len(faults) == 3 and suspects(links, faults, names) == ["c"]
    assert suspects(links, link_faults(links, names, 1000), names) == []  # all are slow: nobody's fault alone


def test_trouble_of_ranks_is_told_where_no_link_is_to_blame() -> None:
    check = NodeCheck(None, (), True, None, tell=lambda line: None)
    good = Measured((Link("between", (0, 1), 100.0),), 90.0)
    assert judge_links(check, [good, Measured((), 90.0)], ["a", "b"]) == []
    (fault,) = judge_links(check, [good, Measured((), None, "no process group: x")], ["a", "b"])
    assert (fault.host, fault.reason) == ("b rank 1", "no process group: x")
    # One end may have got all that it waited for.
    broken = Measured((Link("between", (0, 1), None, "did not come"),), None, "stopped after a round")
    (fault,) = judge_links(check, [good, broken], ["a", "b"])
    assert (fault.host, fault.reason) == ("a rank 0 - b rank 1", "did not come")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_in_a_tournament_everybody_meets_everybody_once(count: int) -> None:
    rounds = pairings(count, 99)
    for pairs in rounds:
        ends = [one for pair in pairs for one in pair]
        assert len(set(ends)) == len(ends) >= count - 1
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


def test_many_nodes_meet_some_in_few_rounds() -> None:
    rounds = pairings(128, 8)
    assert len(rounds) == 8 and all(len(pairs) == 64 for pairs in rounds)
    assert len({pair for pairs in rounds for pair in pairs}) == 8 * 64


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ranks_agree_on_whom_they_meet(device: str) -> None:
    plan = LinkPlan(device, nodes=3, ranks_a_node=4, address="", port=0)  # type: ignore[arg-type]
    met = [list(meetings(plan, rank)) for rank in range(plan.world)]
    assert {len(one) for one in met} == {3 if device == "cpu" else 3 + 3}
    for rank, one in enumerate(met):
        for at, (kind, peer) in enumerate(one):
            if peer is not None:
                assert met[peer][at] == (kind, rank) and peer != rank
                assert (peer // 4 == rank // 4) == (kind == "within")
    if device == "cpu":
        assert not [rank for rank, one in enumerate(met) if rank % 4 and any(peer is not None for _, peer in one)]


# The table.


def test_few_nodes_are_columns() -> None:
    other = replace(NODE, host="node-b", memory_free=2 * GIB, gpus=())
    text = table(["node-a", "node-b"], rows([NODE, other], [IN_STEP, Clock(-0.5, 0.001)]))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["node"].split() == ["node", "node-a", "node-b"]
    assert lines["free memory"].split()[2:] == ["500.0", "GiB", "2.0", "GiB"]
    assert "2 x NVIDIA H200 141.0 GiB" in lines["GPUs"] and lines["GPUs"].endswith("none")
    assert "-0.500 s" in lines["clock"]


def test_many_nodes_are_rows_and_what_is_equal_is_said_once() -> None:
    nodes = [replace(NODE, host=f"n{at}", memory_free=at * GIB) for at in range(6)]
    text = table([node.host for node in nodes], rows(nodes, [IN_STEP] * 6)).splitlines()
    assert text[0].startswith("on all nodes: megatron_rl 0.1.0, python 3.11.7")
    assert text[1].split() == ["node", "free", "memory"] and len(text) == 2 + 6
    assert text[4].split() == ["n2", "2.0", "GiB"]


def test_two_nodes_of_one_host_have_names_of_their_own() -> None:
    assert labels(["a", "b", "a"]) == ["a#1", "b", "a#2"]
    assert (
        one_line(replace(NODE, gpus=())) == "node node-a: 96 CPUs, 500.0 GiB memory free, 50.0 GiB free in /tmp, no GPU"
    )


# The facts of this machine.


def test_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    node = collect([str(tmp_path), str(tmp_path / "none")], str(tmp_path / "token"), False)
    assert node.cpus > 0 and node.memory_free > 0 and node.temporary_free > 0
    assert node.versions["torch"] and len(node.versions["code"]) == 12
    assert node.folders[str(tmp_path / "none")] is None and node.token == "x" and node.gpus == ()
    assert collect((), None, False, is_alone=True).versions == {}


def test_the_digest_is_of_names_and_sizes(tmp_path: Path) -> None:
    for name, content in (("a", "one"), ("b", "two"), ("c", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(content)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    assert digest(tmp_path / "a/weights") == "3" and digest(tmp_path / "none") is None
    assert code_digest() == code_digest()


SMI = """0, NVIDIA H200, 143771, 4, 0, Not Active, Not Active, Not Active
1, NVIDIA H200, 143771, 41000, 2, Active, Not Active, Active
2, NVIDIA T4, 15360, 0, [N/A], [N/A], Not Active, Not Active
"""


def test_the_answers_of_nvidia_smi_are_read() -> None:
    gpus = read_gpus(SMI, "00000000:01:00.0, No, No\n00000000:02:00.0, Yes, No\n")
    assert gpus[0] == GpuFacts(0, "NVIDIA H200", 143771 << 20, 4 << 20, 0)
    assert gpus[1].slowdowns == ("heat", "heat (driver)") and gpus[1].ecc_errors == 2 and gpus[1].bad_rows
    assert gpus[2].ecc_errors is None and not gpus[2].bad_rows
    with pytest.raises(ValueError, match=r"unpack|zip"):
        read_gpus("0, NVIDIA H200\n", "")


@pytest.mark.parametrize(
    ("script", "gpus", "trouble"),
    [
        ("echo '0, T4, 1, 0, 0, Not Active, Not Active, Not Active'", 1, ""),
        ("echo 'Unable to determine the device handle: GPU is lost'; exit 15", 0, "GPU is lost"),
        ("echo nonsense", 0, "not understood"),
        ("sleep 5", 0, "does not answer within 0.5 s"),
    ],
)
def test_a_sick_nvidia_smi_is_a_fault_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: int, trouble: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$1" in *remapped*) exit 1;; esac\nexec 2>&1\n{script}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(nodecheck_facts, "SMI_S", 0.5)
    node = collect((), None, True)
    assert node.gpus is not None and len(node.gpus) == gpus and trouble in node.gpu_trouble
    assert (node.gpu_trouble == "") == (trouble == "")


def test_ports_that_answer_are_told_from_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodecheck_reach, "CONNECT_S", 0.2)
    port = nodecheck_reach.listen("127.0.0.1")
    try:
        # 192.0.2.1 is an address for documents: nobody has it.
        told = nodecheck_reach.reach([("127.0.0.1", port), ("127.0.0.1", 1), ("192.0.2.1", 9)])
    finally:
        nodecheck_reach.stop_listening()
    assert told[0] == "" and "refused" in told[1] and told[2]
    time.sleep(0.05)
    assert nodecheck_reach.reach([("127.0.0.1", port)])[0] != ""


# All of it, with ranks that are calls in this process.


def asked(
    ranks: Sequence[int], function: Callable[..., object], args: Sequence[tuple[object, ...]], timeout_s: float
) -> list[object]:
    assert len(ranks) == len(args) and timeout_s > 0
    return [function(*one) for one in args]


def test_a_sound_cluster_is_told_as_a_table(tmp_path: Path) -> None:
    lines: list[str] = []
    check = NodeCheck(str(tmp_path), (str(tmp_path),), links=False, expected_gbps=None, tell=lines.append)
    before = tmp_path.stat()
    check_nodes(check, Ranks("cpu", 2, ["127.0.0.1"] * 4, are_here=False), asked)  # type: ignore[arg-type]
    assert lines[0].startswith("nodes\nnode") and "#2" in lines[0] and "paths seen" in lines[0]
    assert list(tmp_path.iterdir()) == [] and tmp_path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_single_node_is_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    check = NodeCheck(str(tmp_path), (str(tmp_path),), links=False, expected_gbps=None, tell=lines.append)
    start = time.perf_counter()
    check_nodes(check, Ranks("cpu", 2, ["127.0.0.1"] * 2, are_here=True), None)  # type: ignore[arg-type]
    assert time.perf_counter() - start < 0.1
    assert len(lines) == 1 and lines[0].startswith("node ") and lines[0].endswith("no GPU")


def test_faults_of_nodes_are_refused_all_at_once(tmp_path: Path) -> None:
    check = NodeCheck(
        None, (str(tmp_path / "none"), "/nowhere"), links=True, expected_gbps=None, tell=lambda line: None
    )
    with pytest.raises(ClusterError) as refused:
        check_nodes(check, Ranks("cpu", 1, ["127.0.0.1"] * 2, are_here=False), asked)  # type: ignore[arg-type]
    text = str(refused.value)
    assert text.startswith("4 faults of the nodes") and text.count("/nowhere") == 2 and "#2: " in text


def test_a_fault_reads_as_one_line() -> None:
    fault = NodeFault("node-a", "clock", "9 s ahead", "start ntpd")
    assert str(fault) == "node-a: clock -- 9 s ahead -- start ntpd"
