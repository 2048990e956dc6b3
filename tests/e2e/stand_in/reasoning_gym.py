"""Stands in for the optional package reasoning-gym where that is not installed: two of its tasks, with its names and
the layout of its entries. Nothing of it is here but what an example of this project asks for.
"""

from __future__ import annotations

import random
from typing import Any


def create_dataset(name: str, size: int, seed: int, **arguments: Any) -> list[dict[str, Any]]:
    """`size` entries of {"question", "answer", "metadata"}."""
    return [_TASKS[name](random.Random(f"{seed} {index}"), index, **arguments) for index in range(size)]


def get_score_answer_fn(name: str) -> Any:
    """(answer, entry) -> score. Raises ValueError for a task that is not there."""
    if name not in _TASKS:
        raise ValueError(f"no task {name}")
    return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.01


def _basic_arithmetic(draw: random.Random, index: int, max_digits: int = 2, **_: Any) -> dict[str, Any]:
    left, right = (draw.randrange(10**max_digits) for _ in range(2))
    metadata = {"source_dataset": "basic_arithmetic", "source_index": index, "difficulty": {"num_terms": (2, 2)}}
    return {"question": f"Calculate {left} + {right}.", "answer": str(left + right), "metadata": metadata}


def _countdown(draw: random.Random, index: int, min_numbers: int = 4, max_numbers: int = 6) -> dict[str, Any]:
    numbers = [draw.randrange(1, 100) for _ in range(draw.randint(min_numbers, max_numbers))]
    metadata = {"source_dataset": "countdown", "source_index": index, "numbers": numbers, "target": sum(numbers)}
    question = f"Find a way to make {sum(numbers)} using all of these numbers: {', '.join(map(str, numbers))}."
    return {"question": question, "answer": " + ".join(map(str, numbers)), "metadata": metadata}


_TASKS = {"basic_arithmetic": _basic_arithmetic, "countdown": _countdown}
