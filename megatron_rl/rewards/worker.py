"""What runs in a reward process: load the reward once, then answer each sample that arrives with a result.

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
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.errors import MissingDependency, RewardError
from megatron_rl.rewards.base import RewardFn, RewardResult, RewardSample, to_result
from megatron_rl.rewards.load import load_reward

LONGEST_REASON = 500


@dataclass(frozen=True)
class Setup:
    """First message to a reward process."""

    spec: str
    kwargs: dict[str, Any]
    failed_score: float
    timeout_s: float
    memory_limit: int | None
    """Bytes of address space; None is no limit."""


def main(socket_number: int) -> None:
    """Serve until the other end closes.

    Messages out: None once the reward is loaded, or why it is not; then one RewardResult for each sample.
    """
    threading.Thread(target=_end_with_parent, args=(socket_number,), daemon=True).start()
    connection = Connection(socket_number)
    setup: Setup = connection.recv()
    if setup.memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_limit, setup.memory_limit))
    try:
        reward = load_reward(setup.spec, setup.kwargs)
    except (RewardError, MissingDependency) as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            samples: list[RewardSample] = connection.recv()
        except EOFError:
            return
        for sample in samples:
            connection.send(_score(reward, sample, setup))


def _score(reward: RewardFn, sample: RewardSample, setup: Setup) -> RewardResult:
    # The parent kills a process that is over its time. Should the parent be gone by then, the kernel does it:
    # the default action of SIGPROF ends the process even inside C code that never yields. The timer counts
    # CPU time of all threads.
    signal.setitimer(signal.ITIMER_PROF, (2 * setup.timeout_s + 5) * (os.cpu_count() or 1))
    try:
        return to_result(reward(sample), setup.spec)
    except (
        Exception,
        SystemExit,
    ) as error:  # a reward that raises costs this sample only; the reason is kept and shown
        reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        return RewardResult(setup.failed_score, failed=reason[:LONGEST_REASON])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end_with_parent(socket_number: int) -> None:
    """End this process, and what it started, once the other end of the socket is closed."""
    poller = select.poll()
    poller.register(socket_number, 0)
    while not poller.poll():
        pass
    os.killpg(0, signal.SIGKILL)
