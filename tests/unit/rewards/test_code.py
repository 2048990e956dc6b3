from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.code import last_code_block, read_cases, runs_correctly
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.processes import marked

ADD = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7\n"]}


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def run(code: str, truth: Any, **kwargs: Any) -> dict[str, float]:
    # Loaded machines start processes slowly.
    return runs_correctly(fenced(code), truth, **{"timeout_s": 60.0, "test_timeout_s": 30.0, **kwargs})


def prints(code: str, **kwargs: Any) -> bool:
    """Whether the program says "held": each tries something and says so when it is refused."""
    return run(code, [{"input": "", "output": "held"}], **kwargs)["score"] == 1.0


@pytest.mark.parametrize(
    ("code", "truth", "score"),
    [
        ("print(sum(map(int, input().split())))", ADD, 1.0),
        ("print(sum(map(int, input().split())))", json.dumps(ADD), 1.0),
        ("print(3)", ADD, 0.0),
        (
            "def f(a, b):\n    return [a + b, 0.1 + 0.2]",
            {"inputs": [[1, 2]], "outputs": [[3, 0.3]], "fn_name": "f"},
            1.0,
        ),
        (
            "class Solution:\n    def f(self, a):\n        return a",
            {"inputs": [["x"]], "outputs": ["x"], "fn_name": "f"},
            1.0,
        ),
        ("def f(a):\n    return a + 1", "assert f(1) == 2\nassert f(2) == 3", 1.0),
        ("def f(a):\n    return a + 1", {"tests": "assert f(1) == 3"}, 0.0),
        ("import sys; sys.exit(0)", "assert f(1) == 2", 0.0),
        ("import os; os._exit(0)", "assert f(1) == 2", 0.0),
        ("this is no Python", ADD, 0.0),
    ],
)
def test_a_program_is_scored_by_its_tests(code: str, truth: Any, score: float):
    assert run(code, truth)["score"] == score


def test_a_share_of_the_tests_can_be_the_score():
    assert run("input(); print(3)", ADD, all_tests=False) == {"score": 0.5, "passed": 0.5, "timed_out": 0.0}


def test_a_program_that_hangs_scores_nothing_and_is_counted():
    result = run("while True: pass", ADD, test_timeout_s=0.5, all_tests=False)
    assert result == {"score": 0.0, "passed": 0.0, "timed_out": 1.0}


def test_the_last_block_counts_and_text_that_is_no_program_has_none():
    assert last_code_block("```\na\n```\n```py\nb\n```") == "b\n"
    assert last_code_block("print(1)") == "print(1)"
    assert last_code_block("I do not know.") is None and last_code_block("") is None


@pytest.mark.parametrize("truth", [None, 3, {"inputs": []}, {"inputs": ["1"], "outputs": []}, [{"input": "1"}]])
def test_a_ground_truth_without_tests_is_an_error(truth: Any):
    with pytest.raises(ValueError, match="ground truth"):
        read_cases(truth)


TRY = "\ntry:\n    {}\nexcept {}:\n    print('held')\nelse:\n    print('free')"


@pytest.mark.parametrize(
    ("setup", "attempt", "error"),
    [
        ("import socket", "socket.socket()", "PermissionError"),
        ("import subprocess", "subprocess.run(['true'])", "PermissionError"),
        ("import os", "os.fork()", "PermissionError"),
        ("import os", "os.kill(os.getppid(), 0)", "PermissionError"),
        ("", "open('../outside', 'w')", "PermissionError"),
        ("", "bytearray(3 << 30)", "MemoryError"),
    ],
)
def test_a_program_is_kept_in(setup: str, attempt: str, error: str):
    assert prints(setup + TRY.format(attempt, error))


def test_a_program_that_writes_too_much_ends():
    assert run("print('x' * (1 << 21))", {"tests": "1"}, file_mb=1.0)["score"] == 0.0
    assert run("print('x' * (1 << 19))", {"tests": "1"}, file_mb=1.0)["score"] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_native_code_is_kept_from_the_network_and_from_other_processes():
    attempt = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "tries = [libc.socket(2, 1, 0), libc.fork(), libc.kill(os.getppid(), 0), libc.execv(b'/bin/true', None)]\n"
        "print('held' if tries == [-1] * 4 else tries)"
    )
    assert prints(attempt)


def test_a_program_sees_none_of_the_trainers_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SECRET", "word")
    assert prints("import os; print('free' if 'MY_SECRET' in os.environ else 'held')")


def test_a_program_may_have_threads_and_files_of_its_own():
    code = (
        "import threading\nopen('mine', 'w').write('held')\n"
        "t = threading.Thread(target=lambda: print(open('mine').read()))\nt.start(); t.join()"
    )
    assert prints(code)


def test_a_hanging_program_costs_its_time_and_leaves_nothing(tmp_path: Path):
    """R3"""
    kwargs = {"timeout_s": 1.0, "test_timeout_s": 1.0}
    hang = RewardSample("code", "", fenced("while True: pass"), "pass")
    with RewardPool("code", kwargs, num_workers=1, timeout_s=60.0) as pool:
        (result,) = pool.score([hang])
        assert result is not None and result.failed is None and result.value == 0.0 and result.extra["timed_out"] == 1.0
        assert set(marked(pool.mark)) <= set(pool.pids)
