"""A rule reward for customer service: polite words, forbidden phrases, facts that must be named; clipped.

    reward.function=examples/customer_service/reward.py:compute_score

A row's extra_info may hold `facts`, regular expressions that a good answer matches (an order number, a refund period).
Keywords of reward.kwargs change the lists and weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

POSITIVE = ("thank you", "thanks", "glad", "happy to help", "please", "sorry", "apologize", "appreciate", "of course")
FORBIDDEN = ("not my problem", "calm down", "as an ai", "you should have", "that is impossible", "whatever")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    positive: Sequence[str] = POSITIVE,
    forbidden: Sequence[str] = FORBIDDEN,
    positive_weight: float = 0.1,
    forbidden_weight: float = 0.5,
    fact_weight: float = 0.6,
    most_words: int = 120,
    lowest: float = -1.0,
    highest: float = 1.0,
) -> dict[str, float]:
    """positive_weight for each different polite word (three at most: more of them is flattery), fact_weight for the
    share of the facts that are named, less forbidden_weight for each forbidden phrase and 0.01 for each word above
    most_words; clipped to [lowest, highest]. The parts are logged beside the score.
    """
    text = " ".join(solution_str.lower().split())
    polite = min(sum(_has(text, word) for word in positive), 3)
    rude = sum(_has(text, phrase) for phrase in forbidden)
    facts = list((extra_info or {}).get("facts") or ())
    named = sum(re.search(pattern, solution_str, re.IGNORECASE) is not None for pattern in facts)
    share = named / len(facts) if facts else 1.0
    surplus = max(0, len(text.split()) - most_words)
    score = positive_weight * polite + fact_weight * share - forbidden_weight * rude - 0.01 * surplus
    return {
        "score": max(lowest, min(highest, score)),
        "polite": float(polite),
        "forbidden": float(rude),
        "facts": share,
        "clipped": float(not lowest <= score <= highest),
    }


def _has(text: str, phrase: str) -> bool:
    return re.search(rf"\b{re.escape(phrase)}\b", text) is not None
