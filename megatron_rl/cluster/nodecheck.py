"""What the nodes of a run must have in common, and what is wrong with them: facts, verdicts and a table.

The facts are collected on the nodes by nodecheck_facts.py, nodecheck_reach.py and parallel/link_speed.py;
nodecheck_run.py asks for them. No side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megatron_rl.parallel.links import Link

MOST_SKEW_S = 2.0
"""Clocks further apart than this confuse the times of files, logs and log-ins."""
LEAST_MEMORY = 2**30
LEAST_DISK = 2**30
"""In the temporary folder, where Ray and compilers keep their files."""
BUSY_GPU = 2**30
"""Bytes in use on a GPU before the run's own models are built there."""
FAR_BELOW = 0.4
"""A link slower than this share of the median of its kind is sick."""
SAME_AS_DRIVER = ("megatron_rl", "code", "python", "ray")
"""Versions that the controller shares with the ranks, since they send each other objects. It may have no GPU, and so
another build of torch."""
FEW_NODES = 4
"""So many are columns of the table; more are rows."""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, as nvidia-smi tells."""

    index: int
    name: str
    memory: int
    """Bytes."""
    used: int
    """Bytes."""
    ecc_errors: int | None = None
    """Uncorrected errors of memory since the driver was loaded; None where the GPU does not count them."""
    slowdowns: tuple[str, ...] = ()
    """Why the hardware holds its clocks down now: heat or power."""
    bad_rows: bool = False
    """Rows of memory could not be replaced, or wait for a reset to be."""


@dataclass(frozen=True)
class NodeHealth:
    """One node, as it sees itself."""

    host: str
    versions: Mapping[str, str]
    cpus: int
    memory_free: int
    """Bytes that can be had without swapping."""
    temporary: str
    temporary_free: int
    """Bytes."""
    open_files: int | None
    """Hard limit of a process; None where there is none."""
    gpus: tuple[GpuFacts, ...] | None = ()
    """None where there is no nvidia-smi to ask."""
    gpu_trouble: str = ""
    """Why nvidia-smi could not be asked; "" where it could, and where no GPU is wanted."""
    folders: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Path -> digest of the names and sizes in it; None where it is not there."""
    token: str | None = None
    """What the node read in the run's folder."""


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of the controller's."""

    ahead_s: float
    within_s: float
    """Half the round trip: the figure is not known better."""


@dataclass(frozen=True)
class Wanted:
    """What every node must have."""

    ranks_a_node: int
    with_gpus: bool
    open_files: int
    token: str | None
    """What the controller wrote in the run's folder; None if it wrote nothing."""


@dataclass(frozen=True)
class NodeFault:
    """One thing wrong with a node or a link."""

    host: str
    """Or two of them: "node-a - node-b"."""
    check: str
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.host}: {self.check} -- {self.reason} -- {self.cure}"


def labels(hosts: Sequence[str]) -> list[str]:
    """A name for each node: its host's, with a number where two nodes are on one host."""
    count = Counter(hosts)
    seen: Counter[str] = Counter()
    names: list[str] = []
    for host in hosts:
        seen[host] += 1
        names.append(host if count[host] == 1 else f"{host}#{seen[host]}")
    return names


def node_faults(
    names: Sequence[str], nodes: Sequence[NodeHealth], clocks: Sequence[Clock], driver: NodeHealth, wanted: Wanted
) -> list[NodeFault]:
    """Everything wrong with the nodes. names: one for each node, unique. driver: facts of the controller's own node."""
    faults = version_faults(names, nodes, driver)
    for name, node, clock in zip(names, nodes, clocks, strict=True):
        faults += [NodeFault(name, *fault) for fault in _own_faults(node, clock, wanted)]
        faults += [NodeFault(name, *fault) for fault in _folder_faults(node, driver, wanted)]
    return faults


def version_faults(names: Sequence[str], nodes: Sequence[NodeHealth], driver: NodeHealth) -> list[NodeFault]:
    """Nodes whose packages differ from those of most nodes, and most nodes where they differ from the controller."""
    cure = "give all nodes one environment: the same image, or a folder that they share"
    faults: list[NodeFault] = []
    for package in dict.fromkeys(name for node in nodes for name in node.versions):
        versions = [node.versions.get(package, "not installed") for node in nodes]
        own = driver.versions.get(package, "not installed")
        count = Counter(versions)
        # Where half of the nodes have one and half another, the controller's decides.
        most = max(versions, key=lambda version: (count[version], version == own))
        for name, version in zip(names, versions, strict=True):
            if version != most:
                others = sum(1 for other in versions if other == most)
                reason = f"{version}, where {others} of {len(nodes)} nodes have {most}"
                faults.append(NodeFault(name, f"version of {package}", reason, cure))
        if package in SAME_AS_DRIVER and most != own:
            reason = f"{own}, where the ranks have {most}"
            faults.append(NodeFault(driver.host, f"version of {package} of the controller", reason, cure))
    return faults


def _own_faults(node: NodeHealth, clock: Clock, wanted: Wanted) -> Iterator[tuple[str, str, str]]:
    """(check, reason, cure) of what a node lacks by itself."""
    if abs(clock.ahead_s) - clock.within_s > MOST_SKEW_S:
        way = "ahead of" if clock.ahead_s > 0 else "behind"
        reason = f"{abs(clock.ahead_s):.1f} s {way} the controller's (+- {clock.within_s:.1f} s)"
        yield "clock", reason, "start chrony or ntpd there"
    if node.memory_free < LEAST_MEMORY:
        yield "memory", f"{gib(node.memory_free)} free, less than {gib(LEAST_MEMORY)}", "end other jobs there"
    if node.temporary_free < LEAST_DISK:
        reason = f"{gib(node.temporary_free)} free in {node.temporary}, less than {gib(LEAST_DISK)}"
        yield "disk", reason, "free some space, or set TMPDIR and RAY_TMPDIR to a folder on a larger disk"
    if node.open_files is not None and node.open_files < wanted.open_files:
        reason = f"a process may open {node.open_files}, and this one needs about {wanted.open_files}"
        yield "open files", reason, "raise nofile in limits.conf or LimitNOFILE of the service that starts Ray"
    if wanted.with_gpus:
        yield from _gpu_faults(node, wanted.ranks_a_node)


def _gpu_faults(node: NodeHealth, ranks: int) -> Iterator[tuple[str, str, str]]:
    if node.gpu_trouble:
        yield "GPUs", node.gpu_trouble, "look at dmesg for Xid lines; drain the node"
        return
    if node.gpus is None:
        return
    if len(node.gpus) < ranks:
        reason = f"nvidia-smi lists {len(node.gpus)}, and {ranks} ranks run there"
        yield "GPUs", reason, "a GPU has fallen off its bus: drain the node"
    for gpu in node.gpus:
        if gpu.ecc_errors:
            reason = f"{gpu.ecc_errors} uncorrected memory errors since the driver was loaded"
            yield f"GPU {gpu.index}", reason, "reset the GPU, or drain the node"
        if gpu.bad_rows:
            reason = "rows of its memory are broken, and wait for a reset or cannot be replaced"
            yield f"GPU {gpu.index}", reason, "reset the GPU, or drain the node"
        if gpu.slowdowns:
            reason = f"its clocks are held down by {', '.join(gpu.slowdowns)}"
            yield f"GPU {gpu.index}", reason, "look at cooling and power, or drain the node"


def _folder_faults(node: NodeHealth, driver: NodeHealth, wanted: Wanted) -> Iterator[tuple[str, str, str]]:
    """What of the run's files a node does not see as the controller does."""
    if wanted.token is not None and node.token != wanted.token:
        reason = "does not see the file that the controller has just written in the run's folder"
        yield "run folder", reason, "name a folder that all nodes share in trainer.default_local_dir"
    for path, digest in node.folders.items():
        if digest is None:
            yield path, "is not there", "put it where all nodes see it, or copy it to the same path on each"
        elif digest != driver.folders.get(path, digest):
            yield path, "holds other files, or files of other sizes, than on the controller's node", "copy it again"


def node_notes(names: Sequence[str], nodes: Sequence[NodeHealth], wanted: Wanted) -> list[str]:
    """What a reader should know, and what stops no run."""
    notes: list[str] = []
    if not wanted.with_gpus:
        return notes
    for name, node in zip(names, nodes, strict=True):
        if node.gpus is None:
            notes.append(f"{name}: there is no nvidia-smi: the health of its GPUs is not known")
        for gpu in node.gpus or ():
            if gpu.used > BUSY_GPU:
                notes.append(f"{name}: GPU {gpu.index} has {gib(gpu.used)} in use by other processes")
    kinds = Counter(gpu.name for node in nodes for gpu in node.gpus or ())
    if len(kinds) > 1:
        texts = [f"{count} x {kind}" for kind, count in kinds.most_common()]
        notes.append(f"GPUs of different kinds: {', '.join(texts)}: the slowest sets the pace")
    return notes


def link_faults(links: Sequence[Link], name_of_rank: Sequence[str], expected_gbps: float | None) -> list[NodeFault]:
    """Links that did not answer, that are far below the median of their kind, or below what is expected.

    name_of_rank: the node of each rank, such as "node-a". expected_gbps holds for links between nodes.
    """
    faults: list[NodeFault] = []
    for link in links:
        if link.gbps is None:
            cure = "look at cables, routes, firewalls and the interface's name (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
            faults.append(NodeFault(_ends(link, name_of_rank), _check(link), link.trouble or "did not end", cure))
    for kind in ("within", "between"):
        measured = [(link, link.gbps) for link in links if link.kind == kind and link.gbps is not None]
        if not measured:
            continue
        usual = median(gbps for _, gbps in measured)
        least = expected_gbps if kind == "between" else None
        for link, gbps in measured:
            if gbps < FAR_BELOW * usual or (least is not None and gbps < least):
                more = "" if least is None else f"; expected: {least:g}"
                reason = f"{gbps:.3g} Gbit/s, where the median is {usual:.3g}{more}"
                cure = "drain the node that is in most of these lines, or look at its cable, switch and driver"
                faults.append(NodeFault(_ends(link, name_of_rank), _check(link), reason, cure))
    return faults


def suspects(links: Sequence[Link], faults: Sequence[NodeFault], name_of_rank: Sequence[str]) -> list[str]:
    """Nodes all of whose links to other nodes are at fault, if others' are not: the node is sick, no cable."""
    bad = {fault.host for fault in faults}
    ends: dict[str, list[bool]] = {}
    for link in links:
        if link.kind == "between":
            for rank in link.ranks:
                ends.setdefault(name_of_rank[rank], []).append(_ends(link, name_of_rank) in bad)
    sick = [name for name, is_bad in ends.items() if all(is_bad)]
    return sick if len(sick) < len(ends) else []


def _ends(link: Link, name_of_rank: Sequence[str]) -> str:
    first, second = (f"{name_of_rank[rank]} rank {rank}" for rank in link.ranks)
    return f"{first} - {second}"


def _check(link: Link) -> str:
    return "link between nodes" if link.kind == "between" else "link within the node"


def rows(nodes: Sequence[NodeHealth], clocks: Sequence[Clock]) -> dict[str, list[str]]:
    """Check -> what each node shows."""
    table: dict[str, list[str]] = {}
    for package in dict.fromkeys(name for node in nodes for name in node.versions):
        table[package] = [node.versions.get(package, "-") for node in nodes]
    table["CPUs"] = [str(node.cpus) for node in nodes]
    table["free memory"] = [gib(node.memory_free) for node in nodes]
    table["free disk"] = [f"{gib(node.temporary_free)} ({node.temporary})" for node in nodes]
    table["open files"] = ["no limit" if node.open_files is None else str(node.open_files) for node in nodes]
    table["GPUs"] = [_gpus(node) for node in nodes]
    table["clock"] = [f"{clock.ahead_s:+.3f} s +- {clock.within_s:.3f}" for clock in clocks]
    paths = list(dict.fromkeys(path for node in nodes for path in node.folders))
    if paths:
        there = [sum(node.folders.get(path) is not None for path in paths) for node in nodes]
        table["paths seen"] = [f"{count} of {len(paths)}" for count in there]
    return table


def _gpus(node: NodeHealth) -> str:
    if node.gpu_trouble or node.gpus is None:
        return "?"
    kinds = Counter(f"{gpu.name} {gib(gpu.memory)}" for gpu in node.gpus)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"


def one_line(node: NodeHealth) -> str:
    """The only node of a run, for its first lines."""
    gpus = "no GPU" if node.gpus == () and not node.gpu_trouble else f"GPUs: {_gpus(node)}"
    free = f"{gib(node.memory_free)} memory free, {gib(node.temporary_free)} free in {node.temporary}"
    return f"node {node.host}: {node.cpus} CPUs, {free}, {gpus}"


def table(names: Sequence[str], checks: Mapping[str, Sequence[str]]) -> str:
    """Text: a row a check and a column a node if nodes are few; otherwise a row a node, what is equal on all said once.

    checks: check -> what each node shows.
    """
    if len(names) <= FEW_NODES:
        return _aligned([["node", *names], *([check, *cells] for check, cells in checks.items())])
    equal = {check: cells[0] for check, cells in checks.items() if len(set(cells)) == 1}
    differ = {check: cells for check, cells in checks.items() if check not in equal}
    head = "on all nodes: " + ", ".join(f"{check} {cell}" for check, cell in equal.items())
    body = [["node", *differ], *([name, *(cells[at] for cells in differ.values())] for at, name in enumerate(names))]
    return f"{head}\n{_aligned(body)}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def speeds(links: Iterable[Link], all_reduce_gbps: float | None) -> list[str]:
    """A line for each kind of link."""
    lines: list[str] = []
    for kind, text in (("within", "within a node"), ("between", "between nodes")):
        measured = [link.gbps for link in links if link.kind == kind and link.gbps is not None]
        if measured:
            lines.append(
                f"links {text}: {len(measured)} pairs of ranks, {min(measured):.3g} to {max(measured):.3g} Gbit/s, "
                f"median {median(measured):.3g}"
            )
    if all_reduce_gbps is not None:
        lines.append(f"all-reduce over all ranks: {all_reduce_gbps:.3g} Gbit/s (bus bandwidth)")
    return lines


def gib(size: int) -> str:
    """As "1.5 GiB"."""
    return f"{size / 2**30:,.1f} GiB"
