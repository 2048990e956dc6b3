"""Gives every test process, and what it starts, the environment of launch/env.sh and its signals, however
pytest was started.

Runs before torch is imported anywhere: thread counts and compile switches are read only then.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


_load_environment()
_heed_signals()
