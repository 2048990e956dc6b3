"""What runs are doing, from the files of their folders: nothing is asked of the processes, and nothing is changed.

Whether a run is alive is the lock's to say (runs/folder.py): the kernel frees it when the process ends, however it
ends. A file system without locks leaves the age of status.json.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.observe.run_status import BEAT_S, ENDS, STATUS_FILE, LastCheckpoint, RunStatus, read_status
from megatron_rl.runs.folder import LOCK_FILE, LockHolder, holds_run, lock_holder

LATE_S = 6 * BEAT_S
"""Age of status.json from which a run that lives gave no sign of life."""
State = Literal["starting", "running", "done", "stopped", "failed", "dead", "unknown"]


@dataclass(frozen=True)
class RunReport:
    """One run, as its folder tells."""

    run: str
    state: State
    note: str
    """What a reader must know beside the state; "" where there is nothing."""
    status: RunStatus | None
    """Contents of status.json; None where there is none of this run."""


def report_run(folder: Path, now: float) -> RunReport:
    """The run in the folder. now: seconds since 1970. DataError where status.json is none."""
    try:
        status = read_status(folder / STATUS_FILE)
    except FileNotFoundError:
        status = None
    # Looked at after the file: a run that ends in between has written its end.
    holder = lock_holder(folder)
    state, note = judge(status, holder, platform.node(), now)
    return RunReport(str(folder), state, note, status)


def judge(status: RunStatus | None, holder: LockHolder, here: str, now: float) -> tuple[State, str]:
    """(state, note) of a run by its status.json and by who holds the lock. here: this host's name."""
    if status is None:
        if holder.is_locked:
            return "starting", "its files are not written yet"
        return "unknown", f"there is no {STATUS_FILE}"
    age = now - status.updated
    if not holder.has_locks:
        if status.phase in ENDS:
            return _ended(status)
        state: State = "running" if age < LATE_S else "dead"
        return state, f"this file system has no locks; {STATUS_FILE} is {duration(age)} old"
    other = holder.pid is not None and status.host == here and holder.pid != status.pid
    if holder.is_locked and other:
        return "starting", f"process {holder.pid} is about to go on, or to begin anew, in this folder"
    if status.phase in ENDS:
        return _ended(status)
    if not holder.is_locked:
        return "dead", f"its process is gone since {clock(status.updated)}, in phase {status.phase}"
    if age > LATE_S:
        return "running", f"no sign of life for {duration(age)}: the controller or the disk hangs"
    return ("starting" if status.phase == "starting" else "running"), ""


def _ended(status: RunStatus) -> tuple[State, str]:
    state: State = "done" if status.phase == "done" else "stopped" if status.phase == "stopped" else "failed"
    return state, status.message or ""


def runs_in(path: Path) -> list[Path]:
    """The folder itself if it holds a run, otherwise those folders in it that do, the newest sign of life last."""
    if is_run(path):
        return [path]
    runs = [entry for entry in path.iterdir() if entry.is_dir() and is_run(entry)] if path.is_dir() else []
    return sorted(runs, key=lambda run: (_touched(run), run.name))


def is_run(path: Path) -> bool:
    """Whether a run is in the folder, or about to begin in it."""
    return holds_run(path) or (path / LOCK_FILE).exists()


def _touched(run: Path) -> float:
    file = run / STATUS_FILE
    return file.stat().st_mtime if file.exists() else 0.0


def as_text(report: RunReport, now: float) -> str:
    """Some lines of text for one run."""
    status, where = report.status, ""
    if status is not None:
        where = f" on {status.host} (process {status.pid})" if report.state in ("starting", "running", "dead") else ""
        where += f", step {status.step} of {status.total}"
    rows = [("note", report.note)] if report.note else []
    if status is not None:
        rows += _rows(report, status, now)
    return "\n".join([f"{report.run}: {report.state}{where}", *(f"  {name:<12}{text}" for name, text in rows)])


def _rows(report: RunReport, status: RunStatus, now: float) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if report.state in ("starting", "running"):
        rows.append(("phase", f"{status.phase}, for {duration(now - status.phase_since)}"))
    if status.seconds_a_step is not None:
        rest = "" if status.left_s is None or report.state != "running" else f", {duration(status.left_s)} left"
        rows.append(("rate", f"{status.seconds_a_step:.3g} s a step{rest}"))
    rows.append(("checkpoint", _checkpoint(status.checkpoint, now)))
    rows.append(("restarts", str(status.restarts)))
    rows.append(("started", f"{clock(status.started)}; last sign of life {duration(now - status.updated)} ago"))
    return rows + [("trouble", line) for line in status.trouble]


def _checkpoint(checkpoint: LastCheckpoint | None, now: float) -> str:
    if checkpoint is None:
        return "none yet"
    return f"{checkpoint.path} (step {checkpoint.step}), {duration(now - checkpoint.time)} old"


def as_table(reports: Sequence[RunReport], now: float) -> str:
    """A line a run."""
    rows = [
        ("run", "state", "step", "phase", "s a step", "left", "checkpoint", "restarts"),
        *(_cells(one, now) for one in reports),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(report: RunReport, now: float) -> tuple[str, ...]:
    status = report.status
    if status is None:
        return (report.run, report.state, *["-"] * 6)
    rate = "-" if status.seconds_a_step is None else f"{status.seconds_a_step:.3g}"
    rest = "-" if status.left_s is None or report.state != "running" else duration(status.left_s)
    saved = "-"
    if status.checkpoint is not None:
        saved = f"step {status.checkpoint.step}, {duration(now - status.checkpoint.time)} old"
    return (
        report.run,
        report.state,
        f"{status.step}/{status.total}",
        status.phase,
        rate,
        rest,
        saved,
        str(status.restarts),
    )


def duration(seconds: float) -> str:
    """As "42 s", "0:03:01" or "2 days 4:00:00"."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return text if days == 0 else f"{days} day{'s' if days > 1 else ''} {text}"


def clock(seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
