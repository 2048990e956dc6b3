"""What a trace of torch's profiler says: time by phase of a step and by family of kernels. Pure, and without torch.

A trace has the form of Chrome's trace viewer. Where it has kernels of a GPU, those count, each in the phase in which
the host launched it. Where it has none, operations of the CPU count, each without those that it calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

MARK = "phase/"
"""What the names of a phase's ranges begin with in a trace."""
OUTSIDE = "outside"
"""The phase of what no range covers."""
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "c10d", "gloo")),
    ("attention", ("flash", "fmha", "attention", "attn", "sdpa")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "_amp_")),
    ("norm", ("norm", "gammabeta")),
    ("matmul", ("gemm", "nvjet", "cutlass", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                "aten::_grouped_mm", "aten::linear", "splitkreduce", "wgmma")),
    ("copies", ("memcpy", "memset", "copy", "catarray", "aten::cat", "aten::contiguous", "aten::clone", "fill",
                "aten::zero_")),
    ("softmax", ("softmax", "_stats_kernel", "_grads_kernel", "logsumexp")),
    ("elementwise", ("elementwise", "reduce_kernel", "aten::add", "aten::mul", "aten::sub", "aten::div", "aten::sum",
                     "aten::silu", "aten::sigmoid", "aten::exp", "aten::neg", "_rotate_kernel", "swiglu",
                     "_forward_kernel", "_backward_kernel")),
)  # fmt: skip
"""Family -> parts of names, in small letters; the first that fits counts. Anything else is `other`."""

Table: TypeAlias = dict[tuple[str, str], "Spent"]
"""(phase, family) -> what went there"""


@dataclass(frozen=True)
class Spent:
    """Milliseconds of a device, and the number of kernels (on a CPU: of operations)."""

    ms: float = 0.0
    calls: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.ms + other.ms, self.calls + other.calls)


def family_of(name: str) -> str:
    """The family of a kernel or of an operation, by its name."""
    small = name.lower()
    return next((family for family, parts in FAMILIES if any(part in small for part in parts)), "other")


def time_by_phase(events: Sequence[Mapping[str, Any]]) -> Table:
    """The table of a trace's events."""
    phases = _Phases(events)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return _added((phases.at(begun), event["name"], ms) for event, begun, ms in _own_times(events))
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    return _added(
        (
            phases.at(launches.get(event.get("args", {}).get("correlation"), event["ts"])),
            event["name"],
            event["dur"] / 1e3,
        )
        for event in kernels
    )


def table_lines(table: Table) -> list[str]:
    """The table for a reader: phases as rows and families as columns, in milliseconds; and the share of each family."""
    if not table:
        return ["nothing was recorded"]
    families = [*(name for name, _ in FAMILIES), "other"]
    families = [family for family in families if any(column == family for _, column in table)]
    phases = list(dict.fromkeys(phase for phase, _ in table))
    rows = [["ms", *families, "all"]]
    for phase in phases:
        times = [table.get((phase, family), Spent()).ms for family in families]
        rows.append([phase, *(f"{ms:.1f}" for ms in times), f"{sum(times):.1f}"])
    sums = [sum(table.get((phase, family), Spent()).ms for phase in phases) for family in families]
    total = sum(sums) or 1.0
    rows.append(["share", *(f"{100 * ms / total:.1f} %" for ms in sums), f"{total:.1f} ms"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


class _Phases:
    """The ranges of phases, which follow one another."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)]
        ranges = sorted((mark["ts"], mark["ts"] + mark["dur"], mark["name"].removeprefix(MARK)) for mark in marks)
        self._starts = [start for start, _, _ in ranges]
        self._ranges = ranges

    def at(self, time: float) -> str:
        """The phase at that time."""
        number = bisect_right(self._starts, time) - 1
        return self._ranges[number][2] if number >= 0 and time < self._ranges[number][1] else OUTSIDE


def _own_times(events: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float, float]]:
    """(event, start, milliseconds without those that it calls) of each operation of the CPU."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    own: list[tuple[Mapping[str, Any], list[float]]] = []
    for of_thread in by_thread.values():
        callers: list[tuple[float, list[float]]] = []
        # Of two that start together the longer one is the caller.
        for event in sorted(of_thread, key=lambda one: (one["ts"], -one["dur"])):
            while callers and callers[-1][0] <= event["ts"]:
                callers.pop()
            if callers:
                callers[-1][1][0] -= event["dur"]
            rest = [float(event["dur"])]
            callers.append((event["ts"] + event["dur"], rest))
            own.append((event, rest))
    return [(event, event["ts"], max(0.0, rest[0]) / 1e3) for event, rest in own]


def _added(spent: Iterable[tuple[str, str, float]]) -> Table:
    table: Table = {}
    for phase, name, ms in spent:
        key = phase, family_of(name)
        table[key] = table.get(key, Spent()) + Spent(ms, 1)
    return table
