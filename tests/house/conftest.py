"""Starts pyright on the whole project when the session starts: it takes a minute of one core, which other
tests leave idle. Prints the figures of the house rules that count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = "test_pyright_is_clean"
_FIGURES = pytest.StashKey[list[str]]()
_RUN = pytest.StashKey[tuple[subprocess.Popen[bytes], IO[bytes]]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start it where its test is among the selected ones."""
    if session.config.option.collectonly or not any(item.name == TEST for item in session.items):
        return
    output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process writes
    # nice: tests with time limits come first.
    command = ["nice", "-n", "5", sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    session.config.stash[_RUN] = process, output


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Do not outlive the session."""
    if _RUN in session.config.stash:
        process, _ = session.config.stash[_RUN]
        process.kill()
        process.wait()


@pytest.fixture
def pyright_result(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """Exit status and output of pyright on the project."""
    process, output = request.config.stash[_RUN]
    status = process.wait(timeout=600)
    output.seek(0)
    yield status, output.read().decode(errors="replace")


@pytest.fixture
def house_figure(request: pytest.FixtureRequest) -> Callable[[str, float, float], None]:
    """Takes what a rule counted, its figure and the most that it may be; printed when the session ends."""
    lines = request.config.stash.setdefault(_FIGURES, [])
    return lambda what, figure, most: lines.append(f"{what}: {figure:.3g} (at most {most:g})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures, where their tests ran."""
    for line in config.stash.get(_FIGURES, []):
        terminalreporter.write_line(f"house: {line}")
