"""The diffs of CONTRIBUTING.md apply to the code as it is, pass its style, and add what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.make_data import make
from tests.helpers.config import base_settings, one_step

ROOT = Path(__file__).resolve().parents[2]
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDED = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)
FROM_CONFIG_TO_LOSS = """
import sys, torch
from megatron_rl.algos.estimators.base import ScoredSequences
from megatron_rl.algos.token_losses import UpdateLoss
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError

cfg = load_config([], sys.argv[1:])
tokens = torch.tensor([-1.0, -2.0], requires_grad=True)
columns = {"advantages": torch.tensor([1.0, -1.0]), "old_logprobs": torch.tensor([-1.5, -1.5])}
losses, metrics = UpdateLoss(cfg.actor.loss)(tokens, torch.zeros(2), columns)
losses.sum().backward()
width = cfg.actor.loss.width
wanted = -(1 + width * torch.tanh((torch.tensor([0.5, -0.5]).exp() - 1) / width)) * columns["advantages"]
assert width == 0.3 and torch.allclose(losses, wanted) and bool(tokens.grad.all()), (losses, wanted)
returns = torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64)
ones = torch.ones(4, dtype=torch.int64)
advantages = cfg.algorithm.adv_estimator(ScoredSequences(returns, 0 * ones, ones))
assert advantages.tolist()[0] == 1.25 and cfg.algorithm.estimator_name == "clipped_grpo", advantages
try:
    load_config([], [*sys.argv[1:], "actor.loss.width=0", "algorithm.adv_estimator.bond=1"])
except ConfigError as error:
    faults = {fault.key: fault for fault in error.faults}
assert "above 0" in faults["actor.loss.width"].reason
assert "did you mean bound" in faults["algorithm.adv_estimator.bond"].cure
"""
USE = """
import sys
from types import SimpleNamespace
from my_rewards import close
from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.losses import LOSSES
from megatron_rl.engines import ENGINES
assert LOSSES["soft_clip"](width=0.3).width == 0.3
assert ESTIMATORS["clipped_grpo"]().bound == 2.0
assert ENGINES["sglang"].package == "sglang"
from megatron_rl.config.algorithms import ALGORITHMS
from megatron_rl.config.load import load_config
from megatron_rl.runs.trainer import Trainer
from megatron_rl.trainers import TRAINERS
assert TRAINERS.keys() == ALGORITHMS.keys()
flow = Trainer(load_config([], [*sys.argv[1:], "algorithm.name=grpo_squared"])).flow
assert "squared" in flow.describe(), flow.describe()
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
    command = [sys.executable, "-c", USE, *base_settings(changed)]
    done = subprocess.run(command, cwd=changed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_engine_of_one_file_trains(changed: Path, tmp_path: Path) -> None:
    make(tmp_path / "data", seed=0)
    overrides = one_step(tmp_path / "data", tmp_path / "runs", engine="my_engine:Echo")
    environment = {**os.environ, "PYTHONPATH": str(changed)}
    for verb in ("check", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "megatron_rl", verb, *overrides],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    metrics = next((tmp_path / "runs").rglob("metrics.jsonl")).read_text(encoding="utf-8").splitlines()
    assert len(metrics) == 1 and json.loads(metrics[0])["length/cut_share"] == 1.0, metrics


def test_a_loss_and_an_estimator_go_from_the_config_to_an_objective(changed: Path) -> None:
    settings = [*base_settings(changed), "actor.loss={type: soft_clip, width: 0.3}"]
    settings += ["algorithm.adv_estimator={type: clipped_grpo, bound: 1.25}"]
    command = [sys.executable, "-c", FROM_CONFIG_TO_LOSS, *settings]
    done = subprocess.run(command, cwd=changed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_each_addition_is_one_file_and_at_most_two_lines_of_another() -> None:
    """An import and a line of a table; an engine and a reward not even that. An algorithm is in two tables."""
    for diff in [one for one in diffs() if "megatron_rl/trainers/" not in one]:
        parts = re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:]
        new = [part for part in parts if part.startswith("--- /dev/null")]
        changes = [part for part in parts if part not in new]
        assert len(new) == 1 and len(changes) <= 1, diff
        for part in changes:
            lines = [line for line in part.splitlines()[2:] if line[:1] in "+-"]
            assert len(lines) == 2 and all(line[0] == "+" for line in lines), part


def test_what_the_diffs_add_keeps_the_style(changed: Path) -> None:
    files = [changed / name for diff in diffs() for name in ADDED.findall(diff)]
    ruff = str(Path(sys.executable).with_name("ruff"))
    for verb in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        done = subprocess.run([ruff, *verb, *map(str, files)], cwd=changed, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
