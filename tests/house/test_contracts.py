"""docs/contracts.md lists every promise of the design, in order, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMISES = [*(f"W{i}" for i in range(1, 11)), *(f"N{i}" for i in range(1, 9)), *(f"R{i}" for i in range(1, 13))]
NOT_BUILT = {"W10"}
LEFT_OUT = {"pytest.mark.slow", "pytest.mark.gpu"}
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


def rows_of(text: str) -> list[tuple[str, str]]:
    """(id, tests) of each row of the tables; heads and rules are left out."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [(row[0], " | ".join(row[2:])) for row in cells if row[0].strip("-")]


def functions_in(path: Path) -> set[str]:
    """Names of the functions of a file, without tests that the default suite leaves out."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if not LEFT_OUT & {ast.unparse(mark) for mark in one.decorator_list}}


def faults_of(text: str, root: Path) -> list[str]:
    """What is wrong with the table: ids, their order, and tests that are not there."""
    rows = rows_of(text)
    ids = [row[0] for row in rows]
    found = [] if ids == PROMISES else [f"the ids are {ids}, not {PROMISES}"]
    for name, tests in rows:
        if tests.startswith("not built yet"):
            found += [] if name in NOT_BUILT else [f"{name} is built, or its tests are missing"]
            continue
        other = TEST.sub("", tests).strip(" ,")
        if other or not tests:
            found.append(f"{name}: not a list of `tests/file.py::test_name`: {other!r}")
        for file, function in TEST.findall(tests):
            if not (root / file).is_file():
                found.append(f"{name}: no file {file}")
            elif function not in functions_in(root / file):
                found.append(f"{name}: {file} has no function {function}, or the default suite leaves it out")
    return found


def test_every_promise_names_tests_that_exist() -> None:
    assert faults_of((ROOT / "docs/contracts.md").read_text(encoding="utf-8"), ROOT) == []


@pytest.mark.parametrize(
    ("text", "wrong", "fault"),
    [
        ("| W4 |", "| W44 |", "the ids are"),
        (
            "test_w2_missing_surplus",
            "test_w2_lacking_surplus",
            "W2: tests/unit/weights/test_families.py has no function",
        ),
        ("`tests/unit/trainers/test_ppo.py", "`tests/unit/test_ppos.py", "N6: no file tests/unit/test_ppos.py"),
        ("`tests/golden/test_trajectories.py::test_", "`tests/golden/*.py::test_", "N2: not a list"),
        (
            "e2e/test_runs.py::test_grpo_runs_on_two_ray_workers",
            "e2e/test_moe_run.py::test_grpo_of_experts_on_two_expert_parallel_workers",
            "R4: tests/e2e/test_moe_run.py has no function",
        ),
    ],
)
def test_the_check_sees_a_wrong_row(text: str, wrong: str, fault: str) -> None:
    document = (ROOT / "docs/contracts.md").read_text(encoding="utf-8")
    assert text in document
    assert any(one.startswith(fault) for one in faults_of(document.replace(text, wrong), ROOT))


def test_the_check_sees_a_promise_that_lost_its_tests() -> None:
    text = (ROOT / "docs/contracts.md").read_text(encoding="utf-8")
    lost = re.sub(r"(\| R8 \|[^|]*\|).*", r"\1 not built yet |", text)
    assert faults_of(lost, ROOT) == ["R8 is built, or its tests are missing"]
