"""Reward processes with a time limit for each sample.

A reward is code of the user's: it may hang, crash the interpreter or eat the memory. Threads cannot be
stopped, so samples are scored in processes, and a process that hangs is killed and replaced. What goes wrong
costs the sample it happened on and no other (contract R3).

Each process is a fresh interpreter, started with subprocess: a fork would copy the controller's threads
(torch, Ray) in an unknown state, and multiprocessing's spawn would run the user's main script again in each
process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from megatron_rl.errors import RewardError
from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.rewards.worker import Setup

LARGEST_CHUNK = 32
"""Most samples sent to a process at once: few messages, yet the last ones are shared evenly."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float
    """Of the message that is awaited: the word that the reward is loaded, or the result of assigned[0]."""
    loaded: bool = False
    assigned: deque[int] = field(default_factory=deque)
    """Numbers of the samples that the process has not answered yet, in the order of their scoring."""


class RewardPool:
    """`num_workers` processes that score samples.

    The calling thread does all the work of a `score`; a lock lets one call in at a time. Close the pool, or
    use it in a `with`; the processes also end by themselves when this one dies.
    """

    def __init__(
        self,
        spec: str,
        kwargs: dict[str, Any] | None = None,
        *,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        failed_score: float = 0.0,
        memory_limit: int | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start the processes; they load the reward while the caller goes on.

        spec, kwargs: as in `load_reward`. timeout_s: seconds that one sample may take. failed_score: value of
        a sample whose reward failed. memory_limit: bytes of address space of a process. start_timeout_s:
        seconds until a process has loaded the reward.
        """
        self._setup = Setup(spec, dict(kwargs or {}), failed_score, timeout_s, memory_limit)
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._closed = False
        self._fill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. Where the reward raises, hangs or crashes, `failed` says how.

        Raises RewardError when the reward cannot be loaded.
        """
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            results: list[RewardResult | None] = [None] * len(samples)
            pending = deque(range(len(samples)))
            try:
                self._fill()
                while pending or any(worker.assigned for worker in self._workers):
                    self._assign(samples, pending)
                    self._receive(results, pending)
                    self._kill_overdue(results, pending)
                    self._fill()
            except BaseException:
                # An interrupted call leaves answers on their way, which the next call would take for its own.
                self._kill_all()
                raise
            return [result for result in results if result is not None]

    def preflight(self, sample: RewardSample) -> RewardResult:
        """Score one sample before the run starts. Raises RewardError where the reward does not load or fails
        on it."""
        result = self.score([sample])[0]
        if result.failed is not None:
            raise RewardError(
                f"reward.function: {self._setup.spec!r} fails on a first sample "
                f"(response {sample.solution_str[:80]!r}, ground truth {sample.ground_truth!r}): "
                f"{result.failed}"
            )
        return result

    def close(self) -> None:
        """Kill the processes. May be called again."""
        with self._lock:
            self._closed = True
            self._kill_all()
            self._selector.close()

    def _fill(self) -> None:
        while len(self._workers) < self._num_workers:
            worker = _start(self._setup, time.monotonic() + self._start_timeout_s)
            self._workers.append(worker)
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _assign(self, samples: Sequence[RewardSample], pending: deque[int]) -> None:
        for worker in self._workers:
            if pending and worker.loaded and not worker.assigned:
                # Half of an even share, so that the chunks shrink and all processes end at about the same
                # time.
                share = -(-len(pending) // (2 * self._num_workers))
                chunk = [pending.popleft() for _ in range(min(share, LARGEST_CHUNK))]
                worker.assigned.extend(chunk)
                worker.deadline = time.monotonic() + self._setup.timeout_s
                try:
                    worker.connection.send([samples[number] for number in chunk])
                except (BrokenPipeError, ConnectionResetError):
                    # It died while idle: nothing of the chunk has run. Its end of file tells the rest of the
                    # story.
                    pending.extendleft(reversed(worker.assigned))
                    worker.assigned.clear()

    def _receive(self, results: list[RewardResult | None], pending: deque[int]) -> None:
        """Wait for the first message or deadline, and take all messages that are there."""
        deadlines = [worker.deadline for worker in self._workers if worker.assigned or not worker.loaded]
        wait_s = max(0.0, min(deadlines, default=time.monotonic()) - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            worker: _Worker = key.data
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker, results, pending)
                continue
            if not worker.loaded:
                if message is not None:
                    raise RewardError(message)
                worker.loaded = True
            else:
                results[worker.assigned.popleft()] = message
                worker.deadline = time.monotonic() + self._setup.timeout_s

    def _kill_overdue(self, results: list[RewardResult | None], pending: deque[int]) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            awaited = worker.assigned or not worker.loaded
            # A message that has arrived by now counts, however late this loop comes to read it.
            if not awaited or now < worker.deadline or worker.connection.poll():
                continue
            if not worker.loaded:
                waited = f"{self._start_timeout_s:g} s"
                raise RewardError(
                    f"reward.function: {self._setup.spec!r} was not loaded within {waited} -- make its import faster"
                )
            reason = f"no result within {self._setup.timeout_s:g} s (reward.timeout_s); its process is killed"
            self._give_up(worker, reason, results, pending)

    def _bury(self, worker: _Worker, results: list[RewardResult | None], pending: deque[int]) -> None:
        """A process has ended by itself, or closed its socket and so is of no use."""
        try:
            status = worker.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            status = worker.process.wait()
        how = f"signal {-status}, {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
        if not worker.loaded:
            raise RewardError(f"reward.function: {self._setup.spec!r} -- its process died while loading it ({how})")
        self._give_up(worker, f"its process died ({how})", results, pending)

    def _give_up(self, worker: _Worker, reason: str, results: list[RewardResult | None], pending: deque[int]) -> None:
        """Fail the sample that the process is at, put the rest of its chunk back, and remove it."""
        if worker.assigned:
            results[worker.assigned.popleft()] = RewardResult(self._setup.failed_score, failed=reason)
            pending.extendleft(reversed(worker.assigned))
        self._remove(worker)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        worker.connection.close()
        # The process leads a group of its own, which holds whatever the reward started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()

    def _kill_all(self) -> None:
        for worker in list(self._workers):
            self._remove(worker)


def _start(setup: Setup, deadline: float) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        # The same search path as here, so that the reward's module is found where the controller finds it.
        start = f"from megatron_rl.rewards.worker import main; main({theirs.fileno()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    connection = Connection(ours.detach())
    connection.send(setup)
    return _Worker(process, connection, deadline)
