"""Rewards that compare text: the whole response, or the last number in it."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

# A minus sign counts where nothing that could be subtracted from stands before it. Commas group thousands
# only.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|(?<![\w.])-?\.\d+")


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 where the response without surrounding white space equals the ground truth as text, else 0.

    Raises ValueError where there is no ground truth.
    """
    return float(solution_str.strip() == _truth_text(ground_truth))


def numeric(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 where the last number in the response equals the ground truth as a number ("1,234.0" equals 1234),
    else 0.

    Raises ValueError where the ground truth is no number.
    """
    text = _truth_text(ground_truth)
    try:
        truth = Decimal(text.replace(",", ""))
    except InvalidOperation as error:
        raise ValueError(
            f"the ground truth {text!r} is no number -- use reward.function=exact_match or math"
        ) from error
    found = _NUMBER.findall(solution_str)
    return float(bool(found) and Decimal(found[-1].replace(",", "")) == truth)


def _truth_text(ground_truth: Any) -> str:
    if ground_truth is None:
        raise ValueError("the sample has no ground truth -- add reward_model.ground_truth to its row")
    return str(ground_truth).strip()
