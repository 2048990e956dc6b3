"""Speed of the links between ranks, measured by the ranks themselves before they build their workers.

All ranks make a process group of their own (NCCL on GPUs, gloo on CPU), exchange data in rounds in which each meets one
other, and add data up over all. The rounds meet at the TCP store, not over the links that are measured: where an
exchange does not end, all ranks stop after that round, so that its two ends are the only ones that are named.
"""

# torch leaves some of its types open, and its stores unexported.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megatron_rl.parallel.links import Kind, Link, LinkPlan, Measured, meetings

EXCHANGE_S = 20.0
"""Longest wait for one exchange, first connections included."""
MEET_S = 60.0
"""Longest wait for the other ranks between two rounds."""
REPEATS = 4
MIB = 2**20

_store: dist.TCPStore | None = None


def open_store(address: str) -> int:
    """Open the store at this node's address, for all ranks; its port."""
    global _store
    _store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_S))
    return _store.port


def close_store() -> None:
    """Close what `open_store` opened, if anything."""
    global _store
    _store = None


def measure(plan: LinkPlan) -> Measured:
    """Exchange data with other ranks and add it up over all of them. Every rank of the plan calls this at once.

    After trouble the process group is left as it is: the rank is of no more use, and to end it could take forever.
    """
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    meet_s = timedelta(seconds=MEET_S)
    store = dist.TCPStore(plan.address, plan.port, is_master=False, wait_for_workers=False, timeout=meet_s)
    try:
        dist.init_process_group(
            "nccl" if plan.device == "cuda" else "gloo",
            store=dist.PrefixStore("ranks", store),
            rank=rank,
            world_size=plan.world,
            # Far above EXCHANGE_S: NCCL's own watchdog would end the process before it can say what did not answer.
            timeout=timedelta(seconds=MEET_S + 10 * EXCHANGE_S),
            device_id=device if plan.device == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        return Measured((), None, f"no process group: {error}")
    meeting, links = _Meeting(store, plan.world), list[Link]()
    for kind, peer in meetings(plan, rank):
        link = None if peer is None else _exchange(kind, rank, peer, device)
        if link is not None and (link.ranks[0] == rank or link.gbps is None):
            links.append(link)
        trouble = meeting.trouble(is_well=link is None or link.gbps is not None)
        if trouble is not None:
            return Measured(tuple(links), None, trouble)
    seconds = _best_seconds(_all_reduce(plan, device), device)
    if seconds is None:
        return Measured(tuple(links), None, f"an all-reduce over all ranks did not end within {EXCHANGE_S:g} s")
    moved = 2 * (plan.world - 1) / plan.world * _size("all", device)
    # The destruction of a group that others still use would be their trouble.
    meeting.trouble(is_well=True)
    dist.destroy_process_group()
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    return Measured(tuple(links), moved * 8 / seconds / 1e9)


def _exchange(kind: Kind, rank: int, peer: int, device: torch.device) -> Link:
    """Send to a rank and receive from it, both at once."""
    size = _size(kind, device)
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)

    def start() -> list[dist.Work]:
        ops = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
        return dist.batch_isend_irecv(ops)

    seconds = _best_seconds(start, device)
    ranks = (min(rank, peer), max(rank, peer))
    if seconds is None:
        return Link(kind, ranks, None, f"{size // MIB} MiB did not come over within {EXCHANGE_S:g} s")
    return Link(kind, ranks, size * 8 / seconds / 1e9)


def _all_reduce(plan: LinkPlan, device: torch.device) -> Callable[[], list[dist.Work]]:
    values = torch.zeros(_size("all", device) // 4, dtype=torch.float32, device=device)

    def start() -> list[dist.Work]:
        work = dist.all_reduce(values, async_op=True)
        assert work is not None, "this rank is in the group"
        return [work]

    return start


def _size(kind: Kind | Literal["all"], device: torch.device) -> int:
    """Bytes: enough for the full speed, and few enough for a second in all."""
    if device.type == "cpu":
        return 8 * MIB
    return 256 * MIB if kind == "within" else 64 * MIB


def _best_seconds(start: Callable[[], list[dist.Work]], device: torch.device) -> float | None:
    """The fastest of REPEATS runs, the first of which also connects; None where one does not end."""
    deadline = time.monotonic() + EXCHANGE_S
    if device.type == "cpu":
        return _fastest(lambda: _cpu_seconds(start, deadline))
    # NCCL connects in the thread that calls it, and waits there for the other rank without any deadline.
    results: list[float | None] = []

    def run() -> None:
        torch.cuda.set_device(device)
        results.append(_fastest(lambda: _cuda_seconds(start, deadline)))

    thread = threading.Thread(target=run, name="link", daemon=True)
    thread.start()
    thread.join(EXCHANGE_S + 1.0)
    return results[0] if results else None


def _fastest(timed: Callable[[], float | None]) -> float | None:
    best = float("inf")
    for _ in range(REPEATS):
        seconds = timed()
        if seconds is None:
            return None
        best = min(best, seconds)
    return best


def _cuda_seconds(start: Callable[[], list[dist.Work]], deadline: float) -> float | None:
    """Waits by looking: a wait for NCCL itself has no deadline."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for work in start():
        work.wait()
    after.record()
    while not after.query():
        if time.monotonic() > deadline:
            return None
        time.sleep(1e-4)
    return before.elapsed_time(after) / 1e3


def _cpu_seconds(start: Callable[[], list[dist.Work]], deadline: float) -> float | None:
    before = time.perf_counter()
    for work in start():
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:  # gloo's, for a timeout and for a peer that is gone
            return None
    return time.perf_counter() - before


class _Meeting:
    """Ranks wait for each other at the store, and learn whether all are well."""

    def __init__(self, store: dist.TCPStore, world: int) -> None:
        self._store, self._world, self._round = store, world, 0

    def trouble(self, is_well: bool) -> str | None:
        """Wait for the round's end. None if every rank is well; otherwise what keeps the ranks from going on."""
        self._round += 1
        here, bad, end = (f"{name} {self._round}" for name in ("here", "bad", "end"))
        if not is_well:
            self._store.add(bad, 1)
        if self._store.add(here, 1) == self._world:
            self._store.set(end, "bad" if self._store.add(bad, 0) else "well")
        try:
            self._store.wait([end], timedelta(seconds=MEET_S))
        except RuntimeError:
            return f"other ranks did not come to round {self._round} within {MEET_S:g} s"
        return None if self._store.get(end) == b"well" else "stopped after a round in which an exchange did not end"
