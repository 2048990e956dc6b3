"""Logging of every process: stdlib loggers, one line a record, `[role rank step]` in front."""

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
"""Third-party loggers that are heard from WARNING on."""

NOISE = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.",
    "You are using a Python version",
)
"""How warnings begin that Megatron and torch give about themselves."""

_step: int | None = None


def setup_logging(role: str, rank: int = 0, level: int = logging.INFO) -> None:
    """Send this process's log records to stderr. Called again, it replaces what it set up before.

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
    """Drop warnings of megatron and torch about themselves; those of the run are not among them."""
    for start in NOISE:
        warnings.filterwarnings("ignore", message=re.escape(start))


def set_step(step: int | None) -> None:
    """The step that records of this process carry from now on; None shows as `-`."""
    global _step
    _step = step


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks sys.stderr up for each record, so that lines pass above a progress bar, which stands in for it."""

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
        return super().format(record)
