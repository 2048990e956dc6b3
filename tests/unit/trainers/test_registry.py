"""The table of what algorithms need, the choices of algorithm.name and the trainers are one list."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import megatron_rl
from megatron_rl.config.algorithms import ALGORITHMS, AlgorithmName
from megatron_rl.trainers import TRAINERS

PACKAGE = Path(megatron_rl.__file__).parent


def branches_on_algorithm(source: str) -> list[int]:
    """Lines that compare something with the name of an algorithm."""
    compares = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [
        node.lineno
        for node in compares
        if "name" in ast.unparse(node.left) and "estimator" not in ast.unparse(node.left)
        for right in node.comparators
        if any(isinstance(leaf, ast.Constant) and leaf.value in ALGORITHMS for leaf in ast.walk(right))
    ]


def test_every_algorithm_has_needs_and_a_trainer() -> None:
    assert set(ALGORITHMS) == set(get_args(AlgorithmName)) == set(TRAINERS)


def test_no_branch_on_the_name_of_an_algorithm() -> None:
    found = {str(path): branches_on_algorithm(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_branch_on_the_name_of_an_algorithm_is_seen() -> None:
    source = "a = cfg.algorithm.name != 'sft'\nb = name in ('ppo', 'x')\nc = name == 'x'\n"
    assert branches_on_algorithm(source) == [1, 2]


def test_scores_are_of_rollouts_and_values_too() -> None:
    for needs in ALGORITHMS.values():
        assert needs.rollouts or not needs.rewards
        assert needs.rollouts or not needs.critic
