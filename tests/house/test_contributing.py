"""The diffs of CONTRIBUTING.md apply to the code as it is, pass its style, and add what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDED = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)
USE = """
from types import SimpleNamespace
from my_rewards import close
from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.losses import LOSSES
from megatron_rl.engines import ENGINES
assert LOSSES["soft_clip"](width=0.3).width == 0.3
assert ESTIMATORS["clipped_grpo"]().bound == 2.0
assert ENGINES["sglang"].package == "sglang"
assert close(SimpleNamespace(solution_str=" 9", ground_truth="8")) == {"score": 0.5, "has_number": 1.0}
assert close(SimpleNamespace(solution_str="nine", ground_truth="9"))["score"] == 0.0
"""


def diffs() -> list[str]:
    return DIFF.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with every diff applied."""
    copy = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "megatron_rl", copy / "megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for diff in diffs():
        done = subprocess.run(
            ["git", "apply", "--unsafe-paths", f"--directory={copy}", "-"], cwd="/", input=diff, text=True,
            capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    return copy


def test_what_the_diffs_add_works(changed: Path) -> None:
    done = subprocess.run([sys.executable, "-c", USE], cwd=changed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_the_diffs_add_keeps_the_style(changed: Path) -> None:
    files = [changed / name for diff in diffs() for name in ADDED.findall(diff)]
    ruff = str(Path(sys.executable).with_name("ruff"))
    for verb in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        done = subprocess.run([ruff, *verb, *map(str, files)], cwd=changed, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
