"""Reward for mathematics: is the response's final answer equal to the ground truth as an expression?

Importing this module imports math-verify and sympy, which takes a second: a reward process does it while it
loads the reward, outside the time limit of a sample.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.errors import MissingDependency

try:
    import math_verify
except ImportError as error:
    raise MissingDependency("the reward 'math' needs math-verify -- pip install math-verify") from error


def math_equal(data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, Any]) -> float:
    """1 where math-verify finds the response's last answer (boxed, LaTeX, plain) equal to the truth, else 0.

    To be called in the main thread of a process, as the reward pool does: math-verify bounds its own work by SIGALRM,
    which other threads cannot use. Raises ValueError where the ground truth is missing or is no expression.
    """
    return float(math_verify.verify(_parsed(ground_truth), math_verify.parse(solution_str)))


def _parsed(ground_truth: object) -> list[Any]:
    if ground_truth is None:
        raise ValueError("the sample has no ground truth -- add reward_model.ground_truth to its row")
    text = str(ground_truth).strip()
    # Boxed, so that a bare LaTeX expression is read as LaTeX; plain text is tried when that finds nothing.
    truth = math_verify.parse(f"\\boxed{{{text}}}") or math_verify.parse(text)
    if not truth:
        raise ValueError(f"the ground truth {text[:200]!r} is no expression -- use reward.function=exact_match")
    return truth
