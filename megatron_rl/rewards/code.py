"""Reward for programs: run the response's Python code against the tests of the row, each in a process of its own.

The ground truth says how a program is tested; as a mapping or as JSON text:
    {"inputs": [...], "outputs": [...]}                standard input and expected standard output of each test
    {"inputs": [...], "outputs": [...], "fn_name": f}  arguments (a list) and expected result of calls of f
    [{"input": ..., "output": ...}, ...]               the first form, test by test
    any other text, or {"tests": text}                 statements that follow the program, such as asserts

rewards/sandbox.py says what a program is kept from, and what not.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.rewards.processes import MARK, end_group
from megatron_rl.rewards.sandbox import NO_SECCOMP

SANDBOX = str(Path(__file__).with_name("sandbox.py"))
MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are looked at; a test whose output is longer fails."""
_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """One test. stdin: text for the program. epilogue: code that follows it. expected: what its output must say."""

    stdin: str
    epilogue: str
    expected: str
    is_value: bool
    """The output is a JSON line to be compared as a value, and not as text."""


@dataclass(frozen=True)
class Limits:
    """Of one test's process."""

    seconds: float
    memory: int
    file: int
    strict: bool


def runs_correctly(
    solution_str: str,
    ground_truth: object,
    timeout_s: float = 8.0,
    test_timeout_s: float = 4.0,
    memory_gb: float = 1.0,
    file_mb: float = 16.0,
    all_tests: bool = True,
    need_seccomp: bool = True,
) -> dict[str, float]:
    """score: 1 where the response's last code block passes every test, else 0 (all_tests false: the share of tests
    that pass). passed is that share; timed_out the share of tests that ran out of time or were not reached.

    timeout_s: seconds for all tests together; keep it below reward.timeout_s, which would count the sample as failed.
    test_timeout_s: for one test. memory_gb, file_mb: address space of the program, and size of a file that it writes.
    need_seccomp: refuse to run programs where the kernel cannot keep them from the network.

    Raises ValueError where the ground truth holds no tests, OSError where seccomp is needed and not there.
    """
    cases = read_cases(ground_truth)
    program = last_code_block(solution_str)
    if program is None:
        return {"score": 0.0, "passed": 0.0, "timed_out": 0.0}
    deadline = time.monotonic() + timeout_s
    passed = timed_out = 0
    for number, case in enumerate(cases):
        seconds = min(test_timeout_s, deadline - time.monotonic())
        if seconds <= 0 or (all_tests and passed < number):
            # The score is settled, or the time is over; what was not run is not passed.
            timed_out += len(cases) - number if seconds <= 0 else 0
            break
        limits = Limits(seconds, int(memory_gb * 2**30), int(file_mb * 2**20), need_seccomp)
        result = run_case(program, case, limits)
        passed += result is True
        timed_out += result is None
    share = passed / len(cases)
    score = float(passed == len(cases)) if all_tests else share
    return {"score": score, "passed": share, "timed_out": timed_out / len(cases)}


def last_code_block(text: str) -> str | None:
    """The last fenced block; without a fence, the whole text where it is valid Python."""
    found = _FENCE.findall(text)
    if found:
        return found[-1]
    try:
        compile(text, "response", "exec")
    except (SyntaxError, ValueError):
        return None
    return text if text.strip() else None


def read_cases(ground_truth: object) -> list[Case]:
    """The tests that a row's ground truth describes. Raises ValueError where there are none."""
    if ground_truth is None:
        raise ValueError("the sample has no ground truth -- add its tests as reward_model.ground_truth")
    found = _from_text(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(found, list):
        found = {name + "s": [_entry(case, name) for case in found] for name in ("input", "output")}
    if not isinstance(found, dict):
        raise ValueError(f"the ground truth is a {type(found).__name__} -- give tests (see rewards/code.py)")
    if "tests" in found:
        # The last statement proves that the program got this far: one that leaves early passes nothing.
        word = secrets.token_hex(16)
        return [Case("", f"{found['tests']}\nprint()\nprint({word!r})", word, is_value=False)]
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("the ground truth has no tests: inputs and outputs must be lists of one length, not empty")
    name = found.get("fn_name")
    if name is None:
        return [Case(_lines(i), "", _lines(o), is_value=False) for i, o in zip(inputs, outputs, strict=True)]
    return [_call_case(str(name), i, o) for i, o in zip(inputs, outputs, strict=True)]


def _from_text(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return {"tests": text}
    return found if isinstance(found, dict | list) else {"tests": text}


def _entry(case: object, key: str) -> Any:
    if not isinstance(case, dict) or key not in case:
        raise ValueError(f"a test of the ground truth has no {key!r} -- write {{input: ..., output: ...}}")
    return case[key]


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call_case(name: str, arguments: Any, expected: object) -> Case:
    given = arguments if isinstance(arguments, list) else [arguments]
    # A method of a class Solution counts as well: some data sets ask for one.
    call = (
        f"import json as _json\n_f = {name} if {name!r} in globals() else getattr(Solution(), {name!r})\n"
        f"print()\nprint(_json.dumps(_f(*_json.loads({json.dumps(json.dumps(given))}))))"
    )
    return Case("", call, json.dumps(expected), is_value=True)


def run_case(program: str, case: Case, limits: Limits) -> bool | None:
    """Whether the program passes; None where it ran out of time. Whatever it has started is gone afterwards."""
    output = run_program(program, case, limits)
    return output if output is None or output is False else _agrees(output, case)


def run_program(program: str, case: Case, limits: Limits) -> str | Literal[False] | None:
    """What the program prints; False where it fails or prints too much, None where it ran out of time.

    Raises OSError where seccomp is needed and not there.
    """
    task = {
        "program": f"{program}\n\n{case.epilogue}",
        "limits": {
            "cpu_s": math.ceil(limits.seconds) + 1,
            "memory": limits.memory,
            "file": limits.file,
            "strict": limits.strict,
        },
    }
    with tempfile.TemporaryDirectory(prefix="code-reward-") as folder, tempfile.TemporaryFile() as channel:
        channel.write(json.dumps(task).encode())
        channel.seek(0)
        output = Path(folder, ".output")
        status = _run(folder, channel.fileno(), case.stdin, output, limits.seconds)
        if status == NO_SECCOMP:
            raise OSError(
                "the system has no seccomp to keep programs from the network -- run in a container of its own and set "
                "need_seccomp: false, or use Linux on x86_64 or aarch64"
            )
        if status is None or status == -signal.SIGXCPU:
            return None
        if status != 0 or output.stat().st_size > MOST_OUTPUT:
            return False
        return output.read_text(encoding="utf-8", errors="replace")


def _run(folder: str, channel: int, stdin: str, output: Path, seconds: float) -> int | None:
    """Exit status of the sandbox; None at the time limit."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if MARK in os.environ:
        environment[MARK] = os.environ[MARK]
    # Descriptor 3 is the task's, whatever number it has here.
    launch = (
        f"import os; os.dup2({channel}, 3); os.set_inheritable(3, True); "
        f"import runpy, sys; sys.argv = ['program']; runpy.run_path({SANDBOX!r}, run_name='__main__')"
    )
    with output.open("wb") as sink, tempfile.TemporaryFile() as source:
        source.write(stdin.encode())
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", launch],
            stdin=source,
            stdout=sink,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            pass_fds=(channel,),
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process.pid)
            process.wait()


def _agrees(output: str, case: Case) -> bool:
    if not case.is_value:
        # A program's own output may stand before the word that ends a text of tests.
        ours = [line.rstrip() for line in output.rstrip().splitlines()]
        theirs = [line.rstrip() for line in case.expected.rstrip().splitlines()]
        return ours[-1:] == theirs if case.epilogue else ours == theirs
    lines = output.rstrip().splitlines()
    try:
        return bool(lines) and _same(json.loads(lines[-1]), json.loads(case.expected))
    except ValueError:
        return False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
