"""What runs in a reward process: load the rewards once, then answer each sample that arrives with a result.

The process is started by rewards/pool.py with the number of its socket as the only argument. It ends by
itself when the other end of the socket closes, however the controller died.
"""

from __future__ import annotations

import functools
import os
import resource
import select
import signal
import threading
import traceback
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import MissingDependency, RewardError
from megatron_rl.rewards.base import RewardResult, RewardSample, to_result, to_results
from megatron_rl.rewards.channel import Channel
from megatron_rl.rewards.load import LoadedReward, load_reward
from megatron_rl.rewards.processes import MARK, end_marked

if TYPE_CHECKING:
    # A reward process imports it where a reward is async: it takes a while.
    import asyncio

LONGEST_REASON = 500


@dataclass(frozen=True)
class Setup:
    """First message to a reward process."""

    rewards: tuple[tuple[str, dict[str, Any]], ...]
    """(spec, kwargs) of each reward that the process will be asked for."""
    failed_score: float
    timeout_s: float
    memory_limit: int | None
    """Bytes of address space; None is no limit."""


@dataclass(frozen=True)
class Loaded:
    """How a reward is to be asked."""

    takes_batch: bool
    is_async: bool
    """The samples of a task are scored at once, each within the time limit."""


@dataclass(frozen=True)
class Task:
    """Samples for one of the rewards, by its place in Setup.rewards."""

    reward: int
    samples: list[RewardSample]


@dataclass(frozen=True)
class Scored:
    """The answer for one sample. spent: the process ran out of memory, and is better replaced."""

    result: RewardResult | None
    spent: bool = False


def main(socket_number: int) -> None:
    """Serve until the other end closes.

    Messages out: once all rewards are loaded, a list of one Loaded each, or why one is not loaded (a string); then one
    Scored for each sample.
    """
    threading.Thread(target=_end_with_parent, args=(socket_number,), daemon=True).start()
    connection = Channel(socket_number)
    setup: Setup = connection.recv()
    if setup.memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_limit, setup.memory_limit))
    try:
        rewards = [load_reward(spec, kwargs) for spec, kwargs in setup.rewards]
    except (RewardError, MissingDependency, MemoryError) as error:
        reason = "importing it passes reward.memory_limit_gb -- raise it" if isinstance(error, MemoryError) else error
        connection.send(str(reason))
        return
    connection.send([Loaded(reward.takes_batch, reward.is_async) for reward in rewards])
    while True:
        try:
            task: Task = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        reward = rewards[task.reward]
        for scored in _answers(reward, task.samples, setup):
            connection.send(scored)


def _answers(reward: LoadedReward, samples: list[RewardSample], setup: Setup) -> Iterable[Scored]:
    """The samples' answers in order, each as soon as it is there."""
    if reward.takes_batch:
        return _score_batch(reward, samples, setup)
    if reward.is_async:
        return _score_at_once(reward, samples, setup)
    return (_score(reward, sample, setup) for sample in samples)


def _score(reward: LoadedReward, sample: RewardSample, setup: Setup) -> Scored:
    _limit_cpu_time(setup)
    try:
        return Scored(to_result(_awaited(reward.function(sample), setup), reward.spec))
    except (
        Exception,
        SystemExit,
    ) as error:  # a reward that raises costs this sample only; the reason is kept and shown
        return _failure(error, setup, reward)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _score_batch(reward: LoadedReward, samples: list[RewardSample], setup: Setup) -> list[Scored]:
    _limit_cpu_time(setup)
    try:
        results = to_results(_awaited(reward.function(samples), setup), len(samples), reward.spec, setup.failed_score)
        return [Scored(result) for result in results]
    except (Exception, SystemExit) as error:  # as above, and it costs the batch
        failure = _failure(error, setup, reward)
        return [failure] * len(samples)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _score_at_once(reward: LoadedReward, samples: list[RewardSample], setup: Setup) -> Iterator[Scored]:
    """Scores in the samples' order; all of them are awaited at the same time."""
    _limit_cpu_time(setup)
    loop = _loop()
    tasks = [loop.create_task(_score_one(reward, sample, setup)) for sample in samples]
    try:
        for task in tasks:
            yield loop.run_until_complete(task)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


async def _score_one(reward: LoadedReward, sample: RewardSample, setup: Setup) -> Scored:
    try:
        returned = reward.function(sample)
        return Scored(to_result(await _bounded(returned, setup.timeout_s), reward.spec))
    except (Exception, SystemExit) as error:  # as for one that is not async
        return _failure(error, setup, reward)


def _awaited(returned: Any, setup: Setup) -> object:
    """What a reward returned, or what that gives once it is awaited."""
    if not isinstance(returned, Awaitable):
        return returned
    return _loop().run_until_complete(_bounded(returned, setup.timeout_s))


async def _bounded(returned: Any, timeout_s: float) -> object:
    import asyncio

    task = asyncio.ensure_future(_without_exit(returned))
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()
        raise RewardError(f"no result within {timeout_s:g} s (reward.timeout_s); it is cancelled")
    if task.cancelled():
        raise RewardError("it was cancelled, and gave no result")
    return task.result()


async def _without_exit(returned: Any) -> object:
    try:
        return await returned
    except SystemExit as error:
        # An event loop would end with it, and the samples that run beside this one.
        raise RewardError(f"SystemExit: {error}") from error


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for the life of the process: clients of the reward's own may hold on to it."""
    import asyncio

    return asyncio.new_event_loop()


def _limit_cpu_time(setup: Setup) -> None:
    # The parent kills a process that is over its time. Should the parent be gone by then, the kernel does it:
    # the default action of SIGPROF ends the process even inside C code that never yields. The timer counts
    # CPU time of all threads.
    signal.setitimer(signal.ITIMER_PROF, (2 * setup.timeout_s + 5) * (os.cpu_count() or 1))


def _failure(error: BaseException, setup: Setup, reward: LoadedReward) -> Scored:
    reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    spent = isinstance(error, MemoryError)
    if spent and setup.memory_limit is not None:
        reason = f"MemoryError: passed reward.memory_limit_gb ({setup.memory_limit / 2**30:g}); its process is replaced"
    else:
        reason = reason[:LONGEST_REASON] + _place(error, reward)
    return Scored(RewardResult(setup.failed_score, failed=reason), spent)


def _place(error: BaseException, reward: LoadedReward) -> str:
    """The last line of the reward's own file that the error came through, or of a file beside it."""
    if reward.file is None or error.__traceback__ is None:
        return ""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    folder = str(Path(reward.file).parent)
    for is_own in (lambda file: file == reward.file, lambda file: str(Path(file).parent) == folder):
        for frame, line in reversed(frames):
            if is_own(frame.f_code.co_filename):
                return f" ({frame.f_code.co_filename} line {line}, in {frame.f_code.co_name})"
    return ""


def _end_with_parent(socket_number: int) -> None:
    """End this process, and what it started, once the other end of the socket is closed."""
    poller = select.poll()
    poller.register(socket_number, 0)
    while not poller.poll():
        pass
    mark = os.environ.get(MARK)
    if mark:
        end_marked(mark)
    os.killpg(0, signal.SIGKILL)
