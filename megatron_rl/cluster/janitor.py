"""Clears up after a run however it ends, SIGKILL included. Standard library only: the file is also a program.

A process that starts others (Ray's, ranks, reward processes) has one janitor beside it, in a session of its own, so
that no signal of a terminal reaches it. All that the process starts carries a mark in its environment and has one
temporary folder. When the process closes the janitor's pipe, or dies, the janitor kills what carries the mark or holds
a file of the folder open, removes their files in /dev/shm, and the folder. Reading marks needs Linux's /proc; elsewhere
the folder alone goes.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "MEGATRON_RL_RUN"
"""Environment variable of all that a run starts; its value is the run's own."""
CLEAN_S = 50.0
"""How long the janitor tries. A process in the middle of a system call may take a while to die."""
_SHM = "/dev/shm/"

_lock = threading.Lock()
_users = 0
_running: _Janitor | None = None


class _Janitor:
    """The janitor of this process, and what it has changed in the environment."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rl-", dir=os.environ.get("RAY_TMPDIR")))
        mark = uuid.uuid4().hex
        read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, mark, str(self.folder)],
                stdin=read,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            os.close(write)
            self.folder.rmdir()
            raise
        finally:
            os.close(read)
        self._pipe = write
        own = {MARK: mark, "TMPDIR": str(self.folder)}
        self._before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)

    def end(self) -> None:
        """Have it clear up now, and wait for it."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLEAN_S + 5.0)


@contextmanager
def kept_clean() -> Iterator[Path]:
    """What this process starts inside ends with the block, or with the process. Yields the folder for temporary files.

    Blocks within blocks share one janitor.
    """
    folder = acquire()
    try:
        yield folder
    finally:
        release()


def acquire() -> Path:
    """See kept_clean; `release` once for each."""
    global _users, _running
    with _lock:
        if _running is None:
            _running = _Janitor()
        _users += 1
        return _running.folder


def release() -> None:
    """One user less; the last one has the janitor clear up."""
    global _users, _running
    with _lock:
        _users -= 1
        assert _users >= 0, "release without acquire"
        if _users == 0 and _running is not None:
            janitor, _running = _running, None
            janitor.end()


def processes(mark: str, folder: str, but: Container[int] = ()) -> list[int]:
    """Ids of processes, this one and `but` left out, that carry the mark or have a file below the folder open."""
    needle = f"{MARK}={mark}".encode()
    found: list[int] = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self/fd") else []:
        if not name.isdigit() or int(name) == os.getpid() or int(name) in but:
            continue
        # Other users' processes, and those that end in between.
        with contextlib.suppress(OSError):
            marked = needle in Path("/proc", name, "environ").read_bytes().split(b"\0")
            # A process may write its title over its environment.
            if marked or any(path.startswith(folder + "/") for path in _open_files(name)):
                found.append(int(name))
    return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Files in /dev/shm that the processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= {path for path in _open_files(str(pid)) if path.startswith(_SHM)}
            for line in Path("/proc", str(pid), "maps").read_text(errors="replace").splitlines():
                path = line.partition(_SHM)[2]
                found |= {_SHM + path} if path else set()
    return {path for path in found if not path.endswith(" (deleted)")}


def _open_files(name: str) -> list[str]:
    folder = f"/proc/{name}/fd"
    found: list[str] = []
    for number in os.listdir(folder):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"{folder}/{number}"))
    return found


def clear_up(mark: str, folder: str, parent: int) -> None:
    """Kill what `processes` finds and what that starts meanwhile; then remove its shared memory and the folder.

    parent: the process that all this is for. It has files of the folder open as well, and is left alone.
    """
    end = time.monotonic() + CLEAN_S
    shared: set[str] = set()
    while time.monotonic() < end:
        found = processes(mark, folder, (parent,))
        if not found:
            break
        shared |= shared_memory(found)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if shared:
        others = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        for path in shared - shared_memory(others):
            with contextlib.suppress(OSError):
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def main(mark: str, folder: str) -> None:
    """Wait until the other end of standard input is closed or the parent is gone, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    # A forked copy of the parent may hold the pipe open longer than the parent lives.
    while os.getppid() == parent and not select.select([0], [], [], 0.5)[0]:
        pass
    clear_up(mark, folder, parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
