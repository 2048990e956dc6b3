"""Gives every test process, and what it starts, the environment of launch/env.sh and its signals, however
pytest was started. Keeps the durations of the slowest tests, if asked to.

Runs before torch is imported anywhere: thread counts and compile switches are read only then.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOWEST = 25


def _load_environment() -> None:
    script = 'set -eu; . "$0"; exec env -0'
    found = subprocess.run(
        ["bash", "-c", script, str(ROOT / "launch" / "env.sh")], capture_output=True, check=True, timeout=30
    )
    for entry in found.stdout.decode().split("\0"):
        name, _, value = entry.partition("=")
        if name and name not in os.environ and name not in ("_", "SHLVL", "PWD", "OLDPWD"):
            os.environ[name] = value


def _heed_signals() -> None:
    """Tests send signals to themselves and to what they start. A shell has its background jobs ignore SIGINT, nohup has
    them ignore SIGHUP, and children inherit both.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--durations-file FILE (launch/test.sh gives it)."""
    parser.addoption("--durations-file", help=f"file that keeps the {SLOWEST} slowest tests of this session")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write and print the slowest tests; set-up counts for the test that happens to need it first."""
    file = config.getoption("--durations-file")
    if not file:
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in [one for kind in ("", "passed", "failed") for one in terminalreporter.stats.get(kind, [])]:
        seconds[report.nodeid] += report.duration
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    lines = [f"{duration:7.1f} s  {name}" for name, duration in slowest]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    terminalreporter.write_line(f"the {len(lines)} slowest tests, also in {file}:")
    for line in lines:
        terminalreporter.write_line(line)


_load_environment()
_heed_signals()
