"""Which processes a reward has started, and their end. Standard library only.

A reward process leads a session, so that one signal reaches what it started; but what a reward starts may leave the
session, or outlive a reward process that crashed. Each reward process therefore carries a mark in its environment,
which its descendants inherit whatever their session and parent. Reading marks needs Linux's /proc; elsewhere only the
session's process group is ended. A process that was started without its parent's environment is out of reach.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "MEGATRON_RL_REWARD_PROCESS"
"""Environment variable; its value is a pool's id, a dot, and the number of the reward process in the pool."""
MOST_ROUNDS = 20
LOWEST_PRIORITY = 19


def marked(mark: str) -> list[int]:
    """Process ids, this one left out, whose mark starts with `mark`. Ended ones that wait to be reaped have none."""
    needle = f"{MARK}={mark}".encode()
    found: list[int] = []
    if not Path("/proc/self/environ").exists():
        return found
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # Other users' processes, and those that end in between.
        with contextlib.suppress(OSError):
            entries = Path("/proc", name, "environ").read_bytes().split(b"\0")
            if any(entry.startswith(needle) for entry in entries):
                found.append(int(name))
    return found


def end_marked(mark: str) -> int:
    """Kill every process that `marked` finds, and those they start meanwhile; how many were killed."""
    killed: set[int] = set()
    for _ in range(MOST_ROUNDS):
        found = set(marked(mark))
        if not found - killed:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return len(killed)


def yield_cores(pid: int) -> None:
    """Give the process group that `pid` leads the lowest priority. It stays where the system refuses."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PGRP, pid, LOWEST_PRIORITY)
    # Where Linux shares the cores out by session first, the priority of a session is here.
    with contextlib.suppress(OSError):
        Path("/proc", str(pid), "autogroup").write_text(str(LOWEST_PRIORITY))


def end_group(pid: int) -> None:
    """Kill the process group that `pid` leads, if there is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
