"""What the operating system says of a process: the end of its log, its state, and whether memory has run out.

Called on the process's own node. Reads files of Linux's /proc and of its control group; elsewhere it says less.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 32_768
PY_SPY_S = 10.0
GROUPS = Path("/sys/fs/cgroup")
CRASHES = ("Fatal Python error:", "*** SIG")
"""How the lines begin that faulthandler and Ray write when a process crashes."""
STATES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "is in a system call that cannot be interrupted (a disk, a network file system, a driver)",
    "Z": "has ended",
    "R": "is running",
    "S": "is asleep",
}


@dataclass(frozen=True)
class Probe:
    """Of one process."""

    last_line: str
    """The last line that it wrote on standard error, or that it crashed with; "" if that is not known."""
    state: str
    """Words for a sentence that begins with "its process": "is stopped by a signal (SIGSTOP)"."""
    oom_kills: int
    """See `oom_kills`."""
    stacks: str = ""
    """What py-spy sees of its threads, if it is installed and was asked for."""


def probe(pid: int, log: str, oom: str, stacks: bool = False) -> Probe:
    """Look at a process of this node.

    log: the file of its standard error. oom: its `oom_file`. stacks: ask py-spy for its stacks.
    """
    state = process_state(pid)
    seen = _py_spy(pid) if stacks and state != "has ended" else ""
    return Probe(last_log_line(log), state, oom_kills(oom), seen)


def process_state(pid: int) -> str:
    """One of STATES' words."""
    try:
        # The name, in parentheses, may hold blanks.
        letter = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "has ended"
    return STATES.get(letter, f"is in state {letter}")


def last_log_line(log: str) -> str:
    """The line of the file that says most of the end of its process: a crash's own, or else the last."""
    if not log:
        return ""
    try:
        with Path(log).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return telling_line(lines)


def telling_line(lines: Sequence[str]) -> str:
    """See last_log_line."""
    # Ray marks its log files with lines that begin with a colon.
    written = [line.strip() for line in lines if line.strip() and not line.startswith(":")]
    crashes = [line for line in written if any(mark in line for mark in CRASHES)]
    return (crashes or written[-1:] or [""])[0]


def oom_file() -> str:
    """The file that counts the kernel's kills for memory: of this process's control group, or of the whole machine."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in groups:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (GROUPS / "memory", "memory.oom_control") if kinds else (GROUPS, "memory.events")
        # A container sees its own group as the root, under the path that it has outside.
        for folder in (root / path.lstrip("/"), root):
            if (folder / name).is_file():
                return str(folder / name)
    return "/proc/vmstat"


def oom_kills(file: str) -> int:
    """Processes that the kernel has killed for memory so far, by a file of `oom_file`."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
