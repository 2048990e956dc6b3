"""verl's rule for programs (codecontests, apps, codeforces, taco): the share of tests that the response's code passes.

Programs run where the reward `code` runs them (rewards/code.py): a process of their own for each test, with limits.
Differences from verl: the tests of a sample share one time budget, below the reward's time limit; a program that ends
with an exit status other than 0 fails its test.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

from megatron_rl.rewards.code import Case, Limits, run_program

MOST_TESTS = 10
"""Tests that count where not all pass: the first ones."""
TIMEOUT_S, TEST_TIMEOUT_S = 8.0, 5.0
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json",
)  # fmt: skip
PRELUDE = (
    "".join(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing"))
    + "".join(f"import {name}\n" for name in _MODULES)
    + "sys.setrecursionlimit(600000)\n"
)
"""What verl puts before a program, so that one without imports works."""


def tests_passed(solution_str: str, ground_truth: object) -> dict[str, float]:
    """score: 1 where the code passes every test of {"inputs", "outputs"[, "fn_name"]} (a mapping or JSON text), else
    the share of the first 10 that it passes; timed_out: the share of the tests run that ran out of time.

    The code is what follows the last ```python up to the next fence; without one, the whole response.
    """
    tests = read_tests(ground_truth)
    program = solution_str.split("```python")[-1].split("```")[0]
    name = tests.get("fn_name")
    deadline = time.monotonic() + TIMEOUT_S
    passed: list[bool] = []
    timed_out = 0
    for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        if len(passed) >= MOST_TESTS and not all(passed):
            break
        seconds = min(TEST_TIMEOUT_S, deadline - time.monotonic())
        found = _run(program, name, given, expected, seconds) if seconds > 0 else None
        passed.append(found is True)
        timed_out += found is None
    share = sum(passed[:MOST_TESTS]) / len(passed[:MOST_TESTS])
    return {"score": 1.0 if all(passed) else share, "timed_out": timed_out / len(passed)}


def read_tests(ground_truth: object) -> dict[str, Any]:
    """The tests of a row. Raises ValueError where there are none, or they are no lists of one length."""
    tests = ground_truth
    if isinstance(ground_truth, str):
        try:
            tests = json.loads(ground_truth)
        except ValueError as error:
            raise ValueError(f"the ground truth is no JSON ({error})") from error
    if not isinstance(tests, dict):
        raise ValueError(f"the ground truth is a {type(tests).__name__}, not a mapping with inputs and outputs")
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("the ground truth's inputs and outputs are no lists of one length with a test in them")
    if tests.get("fn_name") is not None and not isinstance(tests["fn_name"], str):
        raise ValueError(f"the ground truth's fn_name is {tests['fn_name']!r}, no name of a function")
    return tests


def truth_fault(truth: object) -> str | None:
    """What is wrong with a row's tests; None where nothing is."""
    try:
        read_tests(truth)
    except ValueError as error:
        return str(error).removeprefix("the ground truth ").removeprefix("the ground truth's ")
    return None


def _run(program: str, name: str | None, given: Any, expected: Any, seconds: float) -> bool | None:
    """Whether the program passes a test; None where it ran out of time."""
    limits = Limits(seconds, 1 << 30, 16 << 20, strict=True)
    if name is None:
        case = Case(_lines(given), "", "", is_value=False)
        output = run_program(PRELUDE + program, case, limits)
        return output if output is None or output is False else same_output(output, _lines(expected))
    try:
        arguments = [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)
        wanted = json.loads(expected) if isinstance(given, str) else expected
    except (TypeError, ValueError):
        return False
    output = run_program(PRELUDE + program, Case("", _call(program, name, arguments), "", is_value=True), limits)
    if output is None or output is False:
        return output
    lines = output.rstrip().splitlines()
    try:
        return bool(lines) and same_value(json.loads(lines[-1]), wanted)
    except ValueError:
        return False


def _call(program: str, name: str, arguments: list[Any]) -> str:
    """Code that calls the function, or the method of class Solution, and prints its result as JSON on the last line."""
    function = f"Solution().{name}" if "class Solution" in program else name
    given = json.dumps(json.dumps(arguments))
    # JSON has texts for keys alone; where the first argument is a mapping, whole numbers were meant.
    keys = "[{int(k): v for k, v in _a[0].items()}]"
    return (
        f"import json as _json\n_a = _json.loads({given})\n"
        f"if _a and isinstance(_a[0], dict) and all(k.lstrip('-').isdigit() for k in _a[0]):\n    _a = {keys}\n"
        f"_r = {function}(*_a)\nprint()\nprint(_json.dumps(_r))"
    )


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_value(result: object, wanted: object) -> bool:
    """Whether a call's result is the expected one, or the first of a list of expected ones."""
    return result == wanted or (isinstance(wanted, list) and bool(wanted) and result == wanted[0])


def same_output(output: str, wanted: str) -> bool:
    """Whether a program printed what was expected: line by line, without white space around lines and without empty
    ones, or as numbers that are nearly equal.
    """
    ours = output.splitlines()
    if "\n".join(ours).strip() == wanted.strip() or "\n".join(line.strip() for line in ours).strip() == wanted.strip():
        return True
    theirs = [line.strip() for line in wanted.split("\n") if line]
    if theirs in (ours, [line for line in ours if line]):
        return True
    return _same_numbers([line for line in ours if line], theirs)


def _same_numbers(ours: list[str], theirs: list[str]) -> bool:
    """One number a line, not all of them whole."""
    if len(ours) != len(theirs) or all(line.isdigit() for line in (*ours, *theirs)):
        return False
    try:
        pairs = [(float(one), float(other)) for one, other in zip(ours, theirs, strict=True)]
    except ValueError:
        return False
    return all(
        one == other or math.isclose(one, other, rel_tol=0.0, abs_tol=1e-8 + 1e-5 * abs(other)) for one, other in pairs
    )
