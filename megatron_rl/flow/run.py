"""Execution of a flow: every node whose inputs are there runs at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

from megatron_rl.flow.node import Node

Timings: TypeAlias = dict[str, tuple[float, float]]
"""node -> (start, end), by time.perf_counter."""


@dataclass(frozen=True)
class PartialRun:
    """A step under way: what it has made so far."""

    values: Mapping[str, object]
    """sources included"""
    done: frozenset[str] = frozenset()
    """Names of the nodes that have run."""
    timings: Timings = field(default_factory=dict[str, tuple[float, float]])


During: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Entered with a node's name while it runs, in the thread that runs it."""


def untold(name: str) -> AbstractContextManager[None]:
    """Nobody is told that a node runs."""
    return nullcontext()


def run_nodes(
    nodes: Sequence[Node], sources: Mapping[str, object], timings: Timings, during: During
) -> dict[str, object]:
    """Run checked nodes from the source values; returns every value by name.

    timings is filled with node -> (start, end) of time.perf_counter as nodes end. A node that is alone in
    being ready runs in the calling thread, so that a debugger and Ctrl-C meet it there; others run in
    threads. After an error nothing more starts, what runs is waited for, and the first error is raised; its
    notes name the nodes that failed.
    """
    values = dict(sources)
    rest = list(nodes)
    running: dict[Future[dict[str, object]], Node] = {}
    pool = ThreadPoolExecutor(max_workers=max(1, len(rest)), thread_name_prefix="flow")
    try:
        while rest or running:
            ready = [node for node in rest if values.keys() >= node.inputs.keys()]
            rest = [node for node in rest if node not in ready]
            if len(ready) == 1 and not running:
                values.update(_timed_call(ready[0], _inputs(ready[0], values), timings, during))
                continue
            for node in ready:
                running[pool.submit(_timed_call, node, _inputs(node, values), timings, during)] = node
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            failed = [future for future in done if future.exception() is not None]
            if failed:
                _raise_first(failed, running)
            for future in done:
                del running[future]
                values.update(future.result())
    finally:  # without waiting: on Ctrl-C closing the worker groups is what ends the calls that still run
        pool.shutdown(wait=False, cancel_futures=True)
    return values


def _raise_first(failed: list[Future[dict[str, object]]], running: Mapping[Future[dict[str, object]], Node]) -> None:
    """Wait for every call that runs, then raise the first error, with a note for each further one."""
    wait(running)
    error = failed[0].exception()
    assert error is not None
    for future, node in running.items():
        further = future.exception()
        if further is not None and future is not failed[0]:
            error.add_note(f"node {node.name!r} failed as well: {type(further).__name__}: {further}")
    raise error


def _inputs(node: Node, values: Mapping[str, object]) -> dict[str, object]:
    return {name: values[name] for name in node.inputs}


def _timed_call(node: Node, inputs: Mapping[str, object], timings: Timings, during: During) -> dict[str, object]:
    start = time.perf_counter()
    try:
        with during(node.name):
            return node.call(inputs)
    except BaseException as error:
        error.add_note(f"in node {node.name!r} of the flow")
        raise
    finally:
        timings[node.name] = (start, time.perf_counter())
