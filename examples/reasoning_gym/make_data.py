"""Write data of a reasoning-gym task, in verl's schema. Needs no network: the package makes its tasks itself.

    python examples/reasoning_gym/make_data.py FOLDER [--task basic_arithmetic] [--args JSON]
                                               [--num-train 20000] [--num-val 400] [--seed 0]

FOLDER then holds
    train.parquet, val.parquet          RL rows: the question as a user message, the answer as ground truth, the entry's
                                        metadata (JSON) in extra_info: what reward.function=reasoning_gym asks for
    sft_train.parquet, sft_val.parquet  the same questions as prompt and response, where the task gives an answer

No question of val.parquet is in train.parquet, and none stands twice in a file; what that leaves out is counted. The
same arguments and package version give the same files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TWO_NUMBERS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 2,
    "operators": ["+"],
    "whitespace": "no_space",
    "allow_parentheses": False,
    "allow_negation": False,
}
"""Arguments of basic_arithmetic for questions such as "Calculate 52 + 17.": within reach of a tiny model."""


def entries(task: str, size: int, seed: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """`size` entries of a task: {"question": str, "answer": str or None, "metadata": mapping}."""
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise SystemExit("this example needs reasoning-gym -- pip install reasoning-gym") from error
    dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **arguments)
    return [dataset[index] for index in range(size)]


def without_repeats(found: list[dict[str, Any]], taken: set[str]) -> list[dict[str, Any]]:
    """The entries whose question is not in `taken` and has not come before; adds theirs to `taken`."""
    kept: list[dict[str, Any]] = []
    for entry in found:
        if entry["question"] not in taken:
            taken.add(entry["question"])
            kept.append(entry)
    return kept


def rl_rows(task: str, found: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """The entries in verl's RL schema."""
    return [
        {
            "data_source": f"reasoning_gym/{task}",
            "prompt": [{"role": "user", "content": entry["question"]}],
            "ability": "reasoning",
            # Some tasks accept many answers and name none; their checker reads the metadata.
            "reward_model": {"style": "rule", "ground_truth": entry["answer"] or ""},
            "extra_info": {
                "split": split,
                "index": index,
                "question": entry["question"],
                "metadata": json.dumps(entry["metadata"], default=str),
            },
        }
        for index, entry in enumerate(found)
    ]


def sft_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries that have an answer, as prompt and response."""
    return [{"prompt": entry["question"], "response": entry["answer"]} for entry in found if entry["answer"]]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` to `path` in one move."""
    part = path.with_name(path.name + ".part")
    pq.write_table(pa.Table.from_pylist(rows), part)
    os.replace(part, path)


def make(folder: Path, task: str, arguments: dict[str, Any], num_train: int, num_val: int, seed: int) -> dict[str, int]:
    """Write all files under `folder`; return file name -> number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    val = without_repeats(entries(task, num_val, seed + 1, arguments), taken)
    train = without_repeats(entries(task, num_train, seed, arguments), taken)
    tables = {
        "train.parquet": rl_rows(task, train, "train"),
        "val.parquet": rl_rows(task, val, "val"),
        "sft_train.parquet": sft_rows(train),
        "sft_val.parquet": sft_rows(val),
    }
    tables = {name: rows for name, rows in tables.items() if rows}
    for name, rows in tables.items():
        write_parquet(folder / name, rows)
    return {name: len(rows) for name, rows in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write data of a reasoning-gym task, in verl's schema.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="basic_arithmetic", help="a name of reasoning-gym's data sets")
    parser.add_argument("--args", type=json.loads, help="the task's own arguments, as JSON")
    parser.add_argument("--num-train", type=int, default=20000, help="questions drawn for training")
    parser.add_argument("--num-val", type=int, default=400, help="questions drawn for validation")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    arguments = chosen.args
    if arguments is None:
        arguments = TWO_NUMBERS if chosen.task == "basic_arithmetic" else {}
    counts = make(chosen.folder, chosen.task, arguments, chosen.num_train, chosen.num_val, chosen.seed)
    rows = ", ".join(f"{name} {count} rows" for name, count in counts.items())
    repeats = chosen.num_train + chosen.num_val - counts["train.parquet"] - counts["val.parquet"]
    print(f"{chosen.folder}: {rows}; {repeats} repeated questions left out")


if __name__ == "__main__":
    main()
