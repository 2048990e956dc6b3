"""What runs in a reward process: load the rewards once, then answer each sample that arrives with a result.

The process is started by rewards/pool.py with the number of its socket as the only argument. It ends by
itself when the other end of the socket closes, however the controller died.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import MissingDependency, RewardError
from megatron_rl.rewards.base import RewardResult, RewardSample, to_result, to_results
from megatron_rl.rewards.channel import Channel
from megatron_rl.rewards.load import LoadedReward, load_reward
from megatron_rl.rewards.processes import MARK, end_marked

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

    Messages out: once all rewards are loaded, which of them take whole batches (a list of bools), or why one is
    not loaded (a string); then one Scored for each sample.
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
    connection.send([reward.takes_batch for reward in rewards])
    while True:
        try:
            task: Task = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        reward = rewards[task.reward]
        if reward.takes_batch:
            for scored in _score_batch(reward, task.samples, setup):
                connection.send(scored)
            continue
        for sample in task.samples:
            connection.send(_score(reward, sample, setup))


def _score(reward: LoadedReward, sample: RewardSample, setup: Setup) -> Scored:
    _limit_cpu_time(setup)
    try:
        return Scored(to_result(reward.function(sample), reward.spec))
    except (
        Exception,
        SystemExit,
    ) as error:  # a reward that raises costs this sample only; the reason is kept and shown
        return _failure(error, setup)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _score_batch(reward: LoadedReward, samples: list[RewardSample], setup: Setup) -> list[Scored]:
    _limit_cpu_time(setup)
    try:
        results = to_results(reward.function(samples), len(samples), reward.spec, setup.failed_score)
        return [Scored(result) for result in results]
    except (Exception, SystemExit) as error:  # as above, and it costs the batch
        failure = _failure(error, setup)
        return [failure] * len(samples)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_cpu_time(setup: Setup) -> None:
    # The parent kills a process that is over its time. Should the parent be gone by then, the kernel does it:
    # the default action of SIGPROF ends the process even inside C code that never yields. The timer counts
    # CPU time of all threads.
    signal.setitimer(signal.ITIMER_PROF, (2 * setup.timeout_s + 5) * (os.cpu_count() or 1))


def _failure(error: BaseException, setup: Setup) -> Scored:
    reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    spent = isinstance(error, MemoryError)
    if spent and setup.memory_limit is not None:
        reason = f"MemoryError: passed reward.memory_limit_gb ({setup.memory_limit / 2**30:g}); its process is replaced"
    return Scored(RewardResult(setup.failed_score, failed=reason[:LONGEST_REASON]), spent)


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
