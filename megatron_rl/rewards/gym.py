"""Reward for tasks of reasoning-gym: the score that the task's own checker gives.

A row names its task as the metadata of reasoning-gym do: extra_info (or extra_info.metadata) holds what the data set's
entry had under "metadata", as a mapping or as JSON text, with "source_dataset"; else data_source is the task's name,
perhaps after a slash (reasoning_gym/basic_arithmetic). The ground truth is the entry's answer.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import MissingDependency
from megatron_rl.rewards.text import last_tag

try:
    # By name: type checkers of environments without this optional package have nothing to look at.
    _gym: Any = importlib.import_module("reasoning_gym")
except ImportError as error:
    raise MissingDependency("the reward 'reasoning_gym' needs reasoning-gym -- pip install reasoning-gym") from error


def task_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    answer_tag: str = "answer",
) -> float:
    """The task's score of the answer, between 0 and 1: of what stands in the last <answer>...</answer>, or of the whole
    response without such a tag.

    Raises ValueError where there is no ground truth, or reasoning-gym has no such task.
    """
    if ground_truth is None:
        raise ValueError("the sample has no ground truth -- add reward_model.ground_truth to its row")
    metadata = _metadata(extra_info)
    name = str(metadata.get("source_dataset") or data_source.rpartition("/")[2])
    tagged = last_tag(solution_str, answer_tag)
    entry = {"question": extra_info.get("question", ""), "answer": ground_truth, "metadata": metadata}
    return float(_scorer(name)(solution_str.strip() if tagged is None else tagged, entry))


def _metadata(extra_info: dict[str, Any]) -> dict[str, Any]:
    found = extra_info.get("metadata", extra_info)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(
                f"extra_info.metadata is no JSON ({error}) -- write the entry's metadata as JSON"
            ) from error
    if not isinstance(found, dict):
        raise ValueError(f"extra_info.metadata is a {type(found).__name__} -- give the entry's metadata, a mapping")
    return found


@functools.cache
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        return _gym.get_score_answer_fn(name)
    except ValueError as error:
        raise ValueError(
            f"reasoning-gym has no task {name!r} -- give extra_info.metadata.source_dataset, or the task as data_source"
        ) from error
