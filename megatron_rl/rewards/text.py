"""Rewards that look at text: the whole response, the last number in it, its form."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.answers import final_number, only_number


def exact_match(data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, Any]) -> float:
    """1 where the response without surrounding white space equals the ground truth as text, else 0.

    Raises ValueError where there is no ground truth.
    """
    return float(solution_str.strip() == _truth_text(ground_truth))


def numeric(data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, Any]) -> float:
    """1 where the last number in the response equals the ground truth as a number ("1,234.0" equals 1234), else 0.

    rewards/answers.py says what a number is.

    Raises ValueError where the ground truth is no number.
    """
    text = _truth_text(ground_truth)
    truth = only_number(text)
    if truth is None:
        raise ValueError(f"the ground truth {text!r} is no number -- use reward.function=exact_match or math")
    return float(final_number(solution_str) == truth)


def _truth_text(ground_truth: object) -> str:
    if ground_truth is None:
        raise ValueError("the sample has no ground truth -- add reward_model.ground_truth to its row")
    return str(ground_truth).strip()


def regex(solution_str: str, pattern: str, whole: bool = False) -> float:
    """1 where `pattern` is found in the response (whole: where it matches all but surrounding white space), else 0.

    The dot matches line ends too. Raises ValueError where the pattern is none.
    """
    compiled = _compiled(pattern)
    found = compiled.fullmatch(solution_str.strip()) if whole else compiled.search(solution_str)
    return float(found is not None)


def tagged(solution_str: str, tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> float:
    """1 where the response is <think>...</think><answer>...</answer> and nothing but white space beside, else 0.

    tags: their names, in order; each stands exactly once and is not empty. opened: the prompt ends with the first
    opening tag, so the response starts inside of it.
    """
    rest = f"<{tags[0]}>{solution_str}" if opened else solution_str
    for tag in tags:
        if rest.count(f"<{tag}>") != 1 or rest.count(f"</{tag}>") != 1:
            return 0.0
    pattern = r"\s*".join(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in tags)
    found = re.fullmatch(pattern, rest.strip(), re.DOTALL)
    return float(found is not None and all(inside.strip() for inside in found.groups()))


def last_tag(solution_str: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag> of the response, stripped; None where there is none."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", solution_str, re.DOTALL)
    return found[-1].strip() if found else None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression ({error}) -- correct it") from error
