"""Logging of every process: stdlib loggers, one line for each record, with `[role rank step]` in front."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import TextIO

LOUD = (
    "ray",
    "vllm",
    "transformers",
    "megatron",
    "urllib3",
    "httpx",
    "filelock",
    "matplotlib",
    "asyncio",
    "PIL",
    "fsspec",
)
"""Third-party loggers whose records below WARNING are dropped."""

NOISE = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.",
    "You are using a Python version",
)
"""First words of the warnings that quiet_libraries drops."""

_step: int | None = None
_last_line = ""


def setup_logging(role: str, rank: int = 0, level: int = logging.INFO) -> None:
    """Send this process's log records to stderr. A second call replaces the first one's handler.

    Example line: 12:03:44 [policy 1 17] WARNING mcore.step: 3 sequences were dropped
    """
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(role, rank))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in LOUD:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def quiet_libraries() -> None:
    """Drop the warnings of Megatron and torch that do not concern the run (NOISE)."""
    for start in NOISE:
        warnings.filterwarnings("ignore", message=re.escape(start))


def set_step(step: int | None) -> None:
    """Set the step in later records of this process; None is shown as `-`."""
    global _step
    _step = step


def last_line() -> str:
    """The newest log line of this process; "" before the first."""
    return _last_line


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Reads sys.stderr anew for each record, because a progress bar replaces it to print lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Formatter(logging.Formatter):
    def __init__(self, role: str, rank: int) -> None:
        super().__init__("%(asctime)s %(where)s %(levelname)s %(source)s: %(message)s", datefmt="%H:%M:%S")
        self._who = f"{role} {rank}"

    def format(self, record: logging.LogRecord) -> str:
        record.where = f"[{self._who} {'-' if _step is None else _step}]"
        record.source = record.name.removeprefix("megatron_rl.")
        global _last_line
        _last_line = super().format(record)
        return _last_line
