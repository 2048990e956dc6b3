"""What pyright says of the whole project, and the figures of the house rules that count."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def pyright_result() -> tuple[int, str]:
    """Exit status and output of pyright on the project."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace")


@pytest.fixture
def house_figure(request: pytest.FixtureRequest) -> Callable[[str, float, float], None]:
    """Takes what a rule counted, its figure and the most that it may be; printed when the session ends."""
    lines = request.config.stash.setdefault(_FIGURES, [])
    return lambda what, figure, most: lines.append(f"{what}: {figure:.3g} (at most {most:g})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures, where their tests ran."""
    for line in config.stash.get(_FIGURES, []):
        terminalreporter.write_line(f"house: {line}")
