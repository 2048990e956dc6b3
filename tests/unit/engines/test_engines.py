"""The engines: a record is true of its class, nothing else asks for an engine's name, a new one is one record."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import megatron_rl
from examples.quickstart.make_data import make
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.engines import ENGINES, OPTIONAL_SETTINGS
from megatron_rl.engines.vllm import SPEED, why_refused
from tests.helpers.config import one_step

PACKAGE = Path(megatron_rl.__file__).parent

RECORD = '''
"""An engine that only this test has."""

from megatron_rl.engines.record import Engine

ENGINE = Engine(name="echo", implementation="echo_engine:EchoEngine", parameters="none")
'''
IMPLEMENTATION = """
from megatron_rl.rollout.fake import FakeEngine


class EchoEngine(FakeEngine):
    def generate(self, requests, sampling):
        print(f"echo: {len(requests)} prompts")
        return super().generate(requests, sampling)
"""


def compares_with_an_engine(source: str) -> list[int]:
    """Lines that compare something with the name of an engine."""
    compares = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [
        node.lineno
        for node in compares
        for side in (node.left, *node.comparators)
        if any(isinstance(leaf, ast.Constant) and leaf.value in ENGINES for leaf in ast.walk(side))
    ]


def test_no_branch_on_the_name_of_an_engine() -> None:
    found = {str(path): compares_with_an_engine(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_branch_on_the_name_of_an_engine_is_seen() -> None:
    assert compares_with_an_engine("a = name == 'vllm'\nb = name in ('hf', 'x')\nc = name == 'x'\n") == [1, 2]


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_record_is_true_of_its_file_and_of_its_class(name: str) -> None:
    engine = ENGINES[name]
    assert engine.name == name and (PACKAGE / "engines" / f"{name}.py").is_file()
    module, _, cls = engine.implementation.partition(":")
    arguments = list(inspect.signature(getattr(import_module(module), cls)).parameters)
    assert arguments == ["settings", "shared"] if engine.shares_weights else arguments == ["settings"]
    assert engine.settings <= set(OPTIONAL_SETTINGS) <= set(inspect.signature(RolloutConfig).parameters)
    assert engine.runs_model or not engine.shares_weights


def test_an_engines_keywords_are_speed_or_refused() -> None:
    assert all(why_refused(keyword) is None for keyword in SPEED)
    assert all(why_refused(f"a_{keyword}_to_come") for keyword in SPEED)


def test_a_new_engine_is_one_record(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "megatron_rl"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "engines" / "echo.py").write_text(RECORD)
    (tmp_path / "copy" / "echo_engine.py").write_text(IMPLEMENTATION)
    data = tmp_path / "data"
    make(data, seed=0)
    command = [sys.executable, "-m", "megatron_rl", "train", *one_step(data, tmp_path / "runs", engine="echo")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "echo: 2 prompts" in done.stdout
    wrong = [*command, "rollout.tp=2", "cluster.n_gpus_per_node=2", "cluster.backend=ray", "rollout.engine_kwargs.a=1"]
    done = subprocess.run(wrong, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 2
    assert "the engine echo runs on one rank" in done.stderr and "the engine echo takes no keywords" in done.stderr
