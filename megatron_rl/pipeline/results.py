"""What stages make of kept answers: rows for SFT, and the table of an evaluation."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict, cast

from megatron_rl.errors import DataError


class KeptAnswer(TypedDict):
    """What is read of a line of answers.jsonl (runs/validation.py)."""

    row: int
    prompt: str
    response: str
    reward: float
    failed: str | None
    finish_reason: str
    data_source: str


def write_rows(answers: Path, file: Path, keep: str, least: float | None) -> str:
    """Write SFT rows of an evaluation's answers; how many, for a reader. Raises DataError if no answer is kept."""
    with answers.open(encoding="utf-8") as lines:
        samples = [cast(KeptAnswer, json.loads(line)) for line in lines]
    rows = picked(samples, keep, least)
    told = f"{len(rows):,} rows of {len(samples):,} samples of {len({one['row'] for one in samples}):,} prompts"
    if not rows:
        reason = f"no sample is whole and has a reward of {least:g} or more" if least is not None else "none is whole"
        raise DataError(f"{answers}: {told}: {reason} -- lower `least`, raise rollout.val.n, or train longer before")
    keys = ("prompt", "response", "data_source", "reward")
    write_whole(file, "".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows))
    return told


def picked(samples: Iterable[KeptAnswer], keep: str, least: float | None) -> list[KeptAnswer]:
    """The samples that become rows, in their order. A sample that was cut, or that a reward failed on, is no answer.

    keep: right takes each different text of a prompt, best the first one of its highest reward. least: the lowest
    reward that is taken; no bound if None.
    """
    by_prompt: dict[int, dict[str, KeptAnswer]] = {}
    for sample in samples:
        whole = sample["finish_reason"] == "stop" and sample["failed"] is None
        if whole and (least is None or sample["reward"] >= least):
            by_prompt.setdefault(sample["row"], {}).setdefault(sample["response"], sample)
    if keep == "best":
        return [max(texts.values(), key=lambda one: one["reward"]) for texts in by_prompt.values()]
    return [sample for texts in by_prompt.values() for sample in texts.values()]


def table(metrics: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown of model -> data set -> metrics: a row a model and data set. Metrics of data sources are left out."""
    every = dict.fromkeys(name for of_model in metrics.values() for of_data in of_model.values() for name in of_data)
    names = [name for name in every if name.startswith("val/") and name.count("/") == 1]
    lines = [["model", "data", *(name.removeprefix("val/") for name in names)]]
    lines.append(["---"] * len(lines[0]))
    for model, of_model in metrics.items():
        for data, values in of_model.items():
            lines.append([model, data, *(f"{values[name]:.4g}" if name in values else "" for name in names)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def wide_table(metrics: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """CSV of stage -> model -> data set -> metrics: a row a stage and model, a column a data set and metric."""
    rows = [(stage, model, of_model) for stage, models in metrics.items() for model, of_model in models.items()]
    columns = dict.fromkeys(
        (data, name)
        for *_, of_model in rows
        for data, values in of_model.items()
        for name in values
        if name.startswith("val/")
    )
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["stage", "model", *(f"{data} {name.removeprefix('val/')}" for data, name in columns)])
    for stage, model, of_model in rows:
        writer.writerow([stage, model, *(of_model.get(data, {}).get(name, "") for data, name in columns)])
    return file.getvalue()


def write_whole(file: Path, content: str) -> None:
    """Write a file as a whole or not at all."""
    fresh = file.with_name(f".{file.name}.writing")
    fresh.write_text(content, encoding="utf-8")
    os.replace(fresh, file)
