"""Looks at every node of a run before its workers are built: asks the ranks, judges, and refuses all faults at once."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from megatron_rl.cluster import nodecheck, nodecheck_facts, nodecheck_reach
from megatron_rl.cluster.nodecheck import Clock, NodeFault, NodeHealth, Wanted
from megatron_rl.cluster.resources import Device
from megatron_rl.cluster.surroundings import least_open_files
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ClusterError
from megatron_rl.parallel.links import Link, LinkPlan, Measured

logger = logging.getLogger(__name__)

FACTS_S, REACH_S, LINKS_S = 60.0, 60.0, 180.0
"""Longest waits for the answers of all nodes."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class NodeCheck:
    """What is looked at."""

    run_folder: str | None
    """Must be one and the same on all nodes; None if nothing is written there."""
    folders: tuple[str, ...]
    """Paths that every node reads; they must hold the same files everywhere."""
    links: bool
    """Whether the speed of links is measured."""
    expected_gbps: float | None
    tell: Callable[[str], None] = logger.info
    """Gets what was seen, some lines at a time."""


def node_check(cfg: RunConfig, tell: Callable[[str], None] = logger.info) -> NodeCheck:
    """What is looked at before the workers of a run are built. Data files are not: the controller alone reads them."""
    folder = cfg.trainer.run_dir
    paths = [cfg.model.path, cfg.model.tokenizer_path, cfg.ref.path if cfg.needs_reference else None]
    paths.append(cfg.critic.path if cfg.needs.critic else None)
    return NodeCheck(
        run_folder=folder if os.path.isdir(folder) and os.access(folder, os.W_OK) else None,
        folders=tuple(dict.fromkeys(os.path.abspath(path) for path in paths if path is not None)),
        links=cfg.cluster.measures_links and cfg.world_size > 1,
        expected_gbps=cfg.cluster.expected_gbps,
        tell=tell,
    )


class Idle:
    """The worker of a group that is only looked at."""

    def __init__(self, rank: int, world: int) -> None:
        """Nothing to build."""


class Ask(Protocol):
    """Calls a function on ranks that have no worker yet."""

    def __call__(
        self,
        ranks: Sequence[int],
        function: Callable[..., ResultT],
        args: Sequence[tuple[object, ...]],
        timeout_s: float,
    ) -> list[ResultT]:
        """args: those of each rank. What each returned. ClusterError if a rank does not answer in time."""
        ...


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run as they were placed: rank r is on node r // ranks_a_node."""

    device: Device
    ranks_a_node: int
    addresses: Sequence[str]
    """Of each rank's node."""
    are_here: bool
    """All on the controller's own node, by a Ray that it has started itself."""

    @property
    def heads(self) -> list[int]:
        """The first rank of each node."""
        return list(range(0, len(self.addresses), self.ranks_a_node))


def check_nodes(check: NodeCheck, ranks: Ranks, ask: Ask) -> None:
    """Tell what was seen. Raises ClusterError with every fault of every node, and of the links between them."""
    with _token(None if ranks.are_here else check.run_folder) as (token_file, token):
        nodes, clocks, driver = _look(check, ranks, ask, token_file)
    names = nodecheck.labels([node.host for node in nodes])
    wanted = Wanted(ranks.ranks_a_node, ranks.device == "cuda", least_open_files(ranks.ranks_a_node), token)
    if ranks.are_here:
        check.tell(nodecheck.one_line(nodes[0]))
    else:
        check.tell(f"nodes\n{nodecheck.table(names, nodecheck.rows(nodes, clocks))}")
    for note in nodecheck.node_notes(names, nodes, wanted):
        check.tell(note)
    faults = nodecheck.node_faults(names, nodes, clocks, driver, wanted)
    if faults or not check.links:
        refuse(faults)
        return
    names_of_ranks = [names[rank // ranks.ranks_a_node] for rank in range(len(ranks.addresses))]
    refuse(_reach_faults(ranks, ask, names))
    refuse(_link_faults(check, ranks, ask, names_of_ranks))


def refuse(faults: Sequence[NodeFault]) -> None:
    """ClusterError with all of them, if there are any."""
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ClusterError(f"{count} of the nodes (node: check -- reason -- cure):\n{lines}")


def _look(
    check: NodeCheck, ranks: Ranks, ask: Ask, token_file: str | None
) -> tuple[list[NodeHealth], list[Clock], NodeHealth]:
    """(facts of each node, its clock, facts of the controller's node)."""
    with_gpus = ranks.device == "cuda"
    if ranks.are_here:
        own = nodecheck_facts.collect((), None, with_gpus, True)
        return [own], [Clock(0.0, 0.0)], own
    question = (check.folders, token_file, with_gpus)
    nodes = ask(ranks.heads, nodecheck_facts.collect, [question] * len(ranks.heads), FACTS_S)
    before = time.time()
    times = ask(ranks.heads, time.time, [()] * len(ranks.heads), FACTS_S)
    after = time.time()
    clocks = [Clock(there - (before + after) / 2, (after - before) / 2) for there in times]
    return nodes, clocks, nodecheck_facts.collect(check.folders, None, False)


@contextmanager
def _token(folder: str | None) -> Iterator[tuple[str | None, str | None]]:
    """(path, content) of a file in the run's folder inside the block. The folder's times are as before afterwards."""
    if folder is None:
        yield None, None
        return
    times, token = os.stat(folder), uuid.uuid4().hex
    file = Path(folder).resolve() / f".nodes-{token[:8]}"
    try:
        file.write_text(token, encoding="utf-8")
        yield str(file), token
    finally:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another user's folder, in which this one may write
            os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))


def _reach_faults(ranks: Ranks, ask: Ask, names: Sequence[str]) -> list[NodeFault]:
    """Nodes that cannot open a TCP connection to others."""
    heads = ranks.heads
    addresses = [ranks.addresses[head] for head in heads]
    ports = ask(heads, nodecheck_reach.listen, [(address,) for address in addresses], REACH_S)
    targets = tuple(zip(addresses, ports, strict=True))
    troubles = ask(heads, nodecheck_reach.reach, [(targets,)] * len(heads), REACH_S)
    ask(heads, nodecheck_reach.stop_listening, [()] * len(heads), REACH_S)
    cure = "open the ports between nodes, or name the interface that joins them"
    return [
        NodeFault(f"{names[at]} - {names[to]}", "TCP connection", f"to {targets[to][0]}: {trouble}", cure)
        for at, of_node in enumerate(troubles)
        for to, trouble in enumerate(of_node)
        if trouble
    ]


def _link_faults(check: NodeCheck, ranks: Ranks, ask: Ask, names_of_ranks: Sequence[str]) -> list[NodeFault]:
    from megatron_rl.parallel import link_speed

    everyone = range(len(ranks.addresses))
    address = ranks.addresses[0]
    (port,) = ask([0], link_speed.open_store, [(address,)], REACH_S)
    plan = LinkPlan(ranks.device, len(ranks.heads), ranks.ranks_a_node, address, port)
    try:
        measured = ask(everyone, link_speed.measure, [(plan,)] * len(everyone), LINKS_S)
    except ClusterError as error:
        error.add_note("while ranks measured the speed of their links, which cluster.check_links=false leaves out")
        raise
    ask([0], link_speed.close_store, [()], REACH_S)
    return judge_links(check, measured, names_of_ranks)


def judge_links(check: NodeCheck, measured: Sequence[Measured], names_of_ranks: Sequence[str]) -> list[NodeFault]:
    """Tell the speeds; what is wrong with the links, by what each rank measured."""
    # Both ends of an exchange that did not end tell of it.
    links: dict[tuple[int, int], Link] = {}
    for link in (link for one in measured for link in one.links):
        if link.ranks not in links or link.gbps is None:
            links[link.ranks] = link
    reduced = [one.all_reduce_gbps for one in measured if one.all_reduce_gbps is not None]
    for line in nodecheck.speeds(links.values(), min(reduced, default=None)):
        check.tell(line)
    faults = nodecheck.link_faults(list(links.values()), names_of_ranks, check.expected_gbps)
    for name in nodecheck.suspects(list(links.values()), faults, names_of_ranks):
        check.tell(f"{name}: all its links are at fault: look there first")
    if not faults:
        cure = "look at cables, routes, firewalls and the interface's name (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
        faults = [
            NodeFault(f"{names_of_ranks[rank]} rank {rank}", "links", one.trouble, cure)
            for rank, one in enumerate(measured)
            if one.trouble
        ]
    return faults
