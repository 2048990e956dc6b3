"""Reward processes with a time limit for each sample.

A reward is code of the user's: it may hang, crash the interpreter or eat the memory. Threads cannot be
stopped, so samples are scored in processes, and a process that hangs is killed and replaced. What goes wrong
costs the sample it happened on and no other (contract R3).

Each process is a fresh interpreter, started with subprocess: a fork would copy the controller's threads (torch, Ray) in
an unknown state, and multiprocessing's spawn would run the user's main script again in each process.

A sample that takes much longer than the others is set aside: its process goes on at the lowest priority while a fresh
one takes its place, and its clock stands still until the other samples are done. So many hanging samples run out their
time limits at once, and not one after the other.
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
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from megatron_rl.errors import RewardError
from megatron_rl.rewards.base import RewardResult, RewardSample, number_of
from megatron_rl.rewards.channel import Channel
from megatron_rl.rewards.processes import MARK, end_group, end_marked, yield_cores
from megatron_rl.rewards.worker import Loaded, Scored, Setup, Task

LARGEST_CHUNK = 32
"""Most samples sent to a process at once: few messages, yet the last ones are shared evenly."""
MOST_ASIDE = 32
"""Most samples set aside at a time. Each holds a process."""
PATIENCE_S, PATIENCE_FACTOR, PATIENCE_SAMPLES = 0.25, 8.0, 8
"""A sample is slow after this long, and this many times the mean of those before it, of which there are so many."""
FOREVER = float("inf")
LONGEST_WAIT_S = 60.0
AWAIT_GRACE_S = 1.0
"""A process cuts what it awaits at the time limit by itself; only one that does not is killed, this much later."""


class FailureLimit:
    """How many samples may fail, over all calls that share it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: dict[int, tuple[RewardSample, str]] = {}

    def note(self, number: int, sample: RewardSample, reason: str) -> None:
        """number: of the sample, the same in all calls."""
        self._failed.setdefault(number, (sample, reason))

    @property
    def is_passed(self) -> bool:
        return len(self._failed) > self._most

    @property
    def left(self) -> int:
        """How many more may fail; below 0 once it is passed."""
        return self._most - len(self._failed)

    @property
    def reasons(self) -> dict[int, str]:
        """Number of each failed sample -> why."""
        return {number: reason for number, (_, reason) in self._failed.items()}

    @property
    def failed(self) -> list[tuple[RewardSample, str]]:
        """Failed samples and why, in the order of their failing."""
        return list(self._failed.values())


class TooManyFailed(RewardError):
    """More samples have failed than a FailureLimit allows."""


@dataclass(frozen=True)
class RewardRule:
    """A reward that runs in the pool's processes. kwargs: passed with every call."""

    spec: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Channel
    mark: str
    deadline: float
    """Of the message that is awaited: the word that the rewards are loaded, or the result of assigned[0]."""
    loaded: bool = False
    rewards: tuple[Loaded, ...] = ()
    assigned: deque[int] = field(default_factory=deque)
    """Numbers of the samples that the process has not answered yet, in the order of their scoring."""
    whole: bool = False
    """What is assigned is one batch: it succeeds or fails together."""
    at_once: bool = False
    """What is assigned is awaited all at the same time."""
    since: float = 0.0
    """When the awaited sample's turn began."""
    aside: bool = False


class _Call:
    """What one `score` works on."""

    def __init__(self, samples: Sequence[RewardSample], reward: int, limit: FailureLimit | None) -> None:
        self.samples, self.reward, self.limit = samples, reward, limit
        self.results: list[RewardResult | None] = [None] * len(samples)
        self.pending = deque(range(len(samples)))
        self.seconds = 0.0
        self.num_done = 0
        self.num_late = 0
        """Samples that have run out of their time."""

    @property
    def is_mostly_late(self) -> bool:
        """Whether it is the reward that is slow, and not a sample."""
        return self.num_late > self.num_done

    def put(self, number: int, result: RewardResult | None) -> None:
        self.results[number] = result
        if self.limit is not None and result is not None and result.failed is not None:
            self.limit.note(number_of(self.samples, number), self.samples[number], result.failed)

    def patience_s(self, timeout_s: float) -> float:
        """Seconds after which a sample counts as slow; FOREVER while there is nothing to compare it with."""
        if self.num_done < PATIENCE_SAMPLES and not self.is_mostly_late:
            return FOREVER
        slow = PATIENCE_S if self.is_mostly_late else max(PATIENCE_S, PATIENCE_FACTOR * self.seconds / self.num_done)
        return slow if slow < timeout_s else FOREVER


def _start_process(mark: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """(our end of its socket, a process that serves rewards). Raises OSError where the system refuses one."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            # The same search path as here, so that the reward's module is found where the controller finds it.
            start = f"from megatron_rl.rewards.worker import main; main({theirs.fileno()})"
            process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, MARK: mark},
            )
    except BaseException:
        ours.close()
        raise
    return ours, process


class RewardPool:
    """`num_workers` processes that score samples.

    The calling thread does all the work of a `score`; a lock lets one call in at a time. Close the pool, or
    use it in a `with`; the processes also end by themselves when this one dies.
    """

    def __init__(
        self,
        rewards: str | RewardRule | Sequence[RewardRule],
        kwargs: dict[str, Any] | None = None,
        *,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        failed_score: float = 0.0,
        memory_limit: int | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start the processes; they load the rewards while the caller goes on.

        rewards: what `load_reward` takes, or Rules; `kwargs` go with a single spec. timeout_s: seconds that one
        call may take (a sample; the whole batch where the reward takes batches). failed_score: value of a sample whose
        reward failed. memory_limit: bytes of address space of a process. start_timeout_s: seconds until a process
        has loaded its rewards.
        """
        if isinstance(rewards, str):
            rewards = RewardRule(rewards, dict(kwargs or {}))
        self._rules = (rewards,) if isinstance(rewards, RewardRule) else tuple(rewards)
        specs = tuple((rule.spec, dict(rule.kwargs)) for rule in self._rules)
        self._setup = Setup(specs, failed_score, timeout_s, memory_limit)
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._mark = uuid.uuid4().hex + "."
        self._num_started = 0
        self._closed = False
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the reward processes."""
        return [worker.process.pid for worker in self._workers]

    @property
    def mark(self) -> str:
        """What the environment of the pool's processes, and of all that those start, says (rewards/processes.py)."""
        return self._mark

    def score(
        self, samples: Sequence[RewardSample], reward: int = 0, limit: FailureLimit | None = None
    ) -> list[RewardResult | None]:
        """One result a sample, in order, by the pool's reward of that number; None where it does not apply.

        Where the reward raises, hangs or crashes, `failed` says how. Raises RewardError when a reward cannot be loaded,
        TooManyFailed as soon as `limit` is passed: samples that have not been scored by then are not waited for.
        """
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            call = _Call(samples, reward, limit)
            try:
                self._fill()
                while call.pending or any(worker.assigned for worker in self._workers):
                    if limit is not None and limit.is_passed:
                        raise TooManyFailed(f"{len(limit.failed)} samples have failed")
                    self._assign(call)
                    self._resume_parked_timers(call)
                    self._receive(call)
                    self._check_deadlines(call)
                    self._fill()
            except BaseException:
                # An interrupted call leaves answers on their way, which the next call would take for its own.
                self._kill_all()
                raise
            return call.results

    def takes_batch(self, reward: int) -> bool:
        """Whether the reward of that number scores a whole batch in one call. Waits until a process has loaded it;
        RewardError if none can.
        """
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            nothing = _Call([], reward, None)
            self._fill()
            while not any(worker.loaded for worker in self._workers):
                self._receive(nothing)
                self._check_deadlines(nothing)
                self._fill()
            return next(worker.rewards[reward].takes_batch for worker in self._workers if worker.loaded)

    def preflight(self, sample: RewardSample) -> list[RewardResult | None]:
        """Score one sample with each reward before the run starts. Raises RewardError where one does not load or
        fails on it."""
        results: list[RewardResult | None] = []
        for number, rule in enumerate(self._rules):
            (result,) = self.score([sample], number)
            if result is not None and result.failed is not None:
                raise RewardError(
                    f"reward.function: {rule.spec!r} fails on a first sample "
                    f"(response {sample.solution_str[:80]!r}, ground truth {sample.ground_truth!r}): "
                    f"{result.failed}"
                )
            results.append(result)
        return results

    def close(self) -> None:
        """Kill the processes and whatever they have started. May be called again."""
        with self._lock:
            self._kill_all()
            if not self._closed:
                self._closed = True
                self._selector.close()

    def _fill(self) -> None:
        """A fresh process takes a second to start: once one had to be replaced, another is kept ready."""
        spare = int(self._num_started > self._num_workers)
        while sum(not worker.aside for worker in self._workers) < self._num_workers + spare:
            self._start()

    def _start(self) -> None:
        mark = f"{self._mark}{self._num_started}."
        self._num_started += 1
        try:
            ours, process = _start_process(mark)
        except OSError as error:
            raise RewardError(
                f"reward process {len(self._workers) + 1} of reward.num_workers {self._num_workers} cannot be started "
                f"({error}) -- lower reward.num_workers, or raise the system's limit of processes and open files"
            ) from error
        worker = _Worker(process, Channel(ours.detach()), mark, time.monotonic() + self._start_timeout_s)
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        # One that has died by now leaves an end of file, which `_receive` finds.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send(self._setup)

    def _assign(self, call: _Call) -> None:
        for worker in self._workers:
            busy = sum(bool(other.assigned) and not other.aside for other in self._workers)
            if not call.pending or busy >= self._num_workers:
                return
            if not worker.loaded or worker.assigned or worker.aside:
                continue
            worker.whole = worker.rewards[call.reward].takes_batch
            worker.at_once = worker.rewards[call.reward].is_async
            # Half of an even share, so that the chunks shrink and all processes end at about the same time.
            share = min(-(-len(call.pending) // (2 * self._num_workers)), LARGEST_CHUNK)
            count = len(call.pending) if worker.whole else share
            chunk = [call.pending.popleft() for _ in range(count)]
            worker.assigned.extend(chunk)
            worker.since = time.monotonic()
            worker.deadline = worker.since + self._limit_s(worker)
            try:
                # Token ids are for reward models; a rule has the text.
                samples = [replace(call.samples[number], prompt_ids=(), response_ids=()) for number in chunk]
                worker.connection.send(Task(call.reward, samples))
            except (BrokenPipeError, ConnectionResetError):
                # It died while idle: nothing of the chunk has run. Its end of file tells the rest of the story.
                call.pending.extendleft(reversed(worker.assigned))
                worker.assigned.clear()

    def _receive(self, call: _Call) -> None:
        """Wait for the first message or deadline, and take all messages that are there."""
        now = time.monotonic()
        due = [worker.deadline for worker in self._workers if worker.assigned or not worker.loaded]
        patience_s = call.patience_s(self._setup.timeout_s)
        due += [worker.since + patience_s for worker in self._workers if self._can_be_parked(worker, call)]
        for key, _ in self._selector.select(min(max(0.0, min(due, default=now) - now), LONGEST_WAIT_S)):
            worker: _Worker = key.data
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._on_worker_exit(worker, call)
                continue
            if not worker.loaded:
                if isinstance(message, str):
                    raise RewardError(message)
                worker.loaded, worker.rewards = True, tuple(message)
            else:
                self._take(worker, message, call)

    def _take(self, worker: _Worker, scored: Scored, call: _Call) -> None:
        call.put(worker.assigned.popleft(), scored.result)
        now = time.monotonic()
        if not worker.aside:
            call.seconds += now - worker.since
            call.num_done += 1
        worker.since, worker.deadline = now, now + self._limit_s(worker)
        # One that was set aside goes on with the rest of its chunk, which others have been given.
        if worker.aside or (scored.spent and not (worker.whole and worker.assigned)):
            call.pending.extendleft(reversed(worker.assigned))
            worker.assigned.clear()
            self._remove(worker)

    def _can_be_parked(self, worker: _Worker, call: _Call) -> bool:
        """Whether others wait behind the sample that the process is at."""
        num_aside = sum(other.aside for other in self._workers)
        blocks = len(worker.assigned) > 1 or (bool(worker.assigned) and bool(call.pending))
        return blocks and not (worker.aside or worker.whole or worker.at_once) and num_aside < MOST_ASIDE

    def _limit_s(self, worker: _Worker) -> float:
        """Seconds that the process has for its next answer."""
        return self._setup.timeout_s + (AWAIT_GRACE_S if worker.at_once else 0.0)

    def _check_deadlines(self, call: _Call) -> None:
        """Set slow samples aside, and give up those that are over their time."""
        now = time.monotonic()
        for worker in list(self._workers):
            awaited = worker.assigned or not worker.loaded
            # A message that has arrived by now counts, however late this loop comes to read it.
            if not awaited or worker.connection.poll():
                continue
            if now >= worker.deadline:
                self._fail_late_sample(worker, call)
            elif self._can_be_parked(worker, call) and now - worker.since >= call.patience_s(self._setup.timeout_s):
                call.pending.extendleft([worker.assigned.pop() for _ in range(len(worker.assigned) - 1)])
                # Where most samples are late there is nothing better to wait for: its clock goes on.
                worker.aside, worker.deadline = True, worker.deadline if call.is_mostly_late else FOREVER
                yield_cores(worker.process.pid)

    def _resume_parked_timers(self, call: _Call) -> None:
        """Start the clocks of the samples that were set aside once all others are done."""
        if call.pending or any(worker.assigned and not worker.aside for worker in self._workers):
            return
        for worker in self._workers:
            if worker.aside and worker.deadline == FOREVER:
                worker.deadline = time.monotonic() + self._setup.timeout_s

    def _fail_late_sample(self, worker: _Worker, call: _Call) -> None:
        if not worker.loaded:
            waited = f"{self._start_timeout_s:g} s"
            specs = " + ".join(rule.spec for rule in self._rules)
            raise RewardError(f"reward.function: {specs!r} was not loaded within {waited} -- make its import faster")
        call.num_late += 1
        reason = f"no result within {self._setup.timeout_s:g} s (reward.timeout_s); its process is killed"
        self._fail_sample(worker, reason, call)

    def _on_worker_exit(self, worker: _Worker, call: _Call) -> None:
        """A process has ended by itself, or closed its socket and so is of no use."""
        try:
            status = worker.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            status = worker.process.wait()
        how = f"signal {-status}, {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
        if not worker.loaded:
            specs = " + ".join(rule.spec for rule in self._rules)
            raise RewardError(f"reward.function: {specs!r} -- its process died while loading it ({how})")
        self._fail_sample(worker, f"its process died ({how})", call)

    def _fail_sample(self, worker: _Worker, reason: str, call: _Call) -> None:
        """Fail the sample that the process is at, put the rest of its chunk back, and remove it."""
        failed = len(worker.assigned) if worker.whole else min(1, len(worker.assigned))
        for _ in range(failed):
            call.put(worker.assigned.popleft(), RewardResult(self._setup.failed_score, failed=reason))
        call.pending.extendleft(reversed(worker.assigned))
        self._remove(worker)

    def _remove(self, worker: _Worker) -> None:
        self._end(worker)
        end_marked(worker.mark)

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        worker.connection.close()
        # The process leads a group of its own, which holds most of what the reward started; its mark finds the rest.
        end_group(worker.process.pid)
        worker.process.wait()

    def _kill_all(self) -> None:
        if self._workers:
            for worker in list(self._workers):
                self._end(worker)
            end_marked(self._mark)
