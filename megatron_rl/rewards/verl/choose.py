"""The rewards `data_source` and `default`: a row is scored by the rule that verl has for its data_source."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.text import exact_match
from megatron_rl.rewards.verl import RULES, known_sources, rule_of

NO_RULE = "verl has no rule for the data source {source!r}"
CURE = (
    "name a reward for it in reward.by_source, or one for all rows in reward.function (code, exact_match, math, "
    "numeric, path/to/file.py:function ...), or give the rows a data_source that verl knows: {sources}"
)


def by_data_source(sample: RewardSample, method: Literal["strict", "flexible"] = "strict") -> object:
    """The score by verl's rule of the sample's data source; None where its row declares none.

    method: how GSM8K's answer is found; flexible takes the last number without "#### ". Raises ValueError for a data
    source that verl has no rule for.
    """
    if not sample.has_source:
        return None
    rule = rule_of(sample.data_source)
    if rule is None:
        raise ValueError(f"{NO_RULE.format(source=sample.data_source)} -- {CURE.format(sources=known_sources())}")
    if sample.ground_truth is None:
        raise ValueError("the sample has no ground truth -- add reward_model.ground_truth to its row")
    extra = {"method": method} if rule == "gsm8k" else {}
    return _function(RULES[rule])(sample.solution_str, sample.ground_truth, **extra)


def by_default(sample: RewardSample, method: Literal["strict", "flexible"] = "strict") -> object:
    """As `by_data_source`; a row that names no data_source is scored by exact_match."""
    if sample.has_source:
        return by_data_source(sample, method)
    return exact_match(sample.data_source, sample.solution_str, sample.ground_truth, sample.extra_info)


@functools.cache
def _function(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return vars(importlib.import_module(module))[name]
