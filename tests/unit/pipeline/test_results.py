"""Rows from kept answers, and the table of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.errors import DataError
from megatron_rl.pipeline.results import KeptAnswer, picked, table, wide_table, write_rows


def answer(row: int, response: str, reward: float, finish: str = "stop", failed: str | None = None) -> KeptAnswer:
    return {
        "row": row,
        "prompt": f"p{row}",
        "response": response,
        "reward": reward,
        "failed": failed,
        "finish_reason": finish,
        "data_source": "s",
    }


SAMPLES = [
    answer(0, "a", 1.0),
    answer(0, "a", 1.0),
    answer(0, "b", 2.0),
    answer(0, "cut", 3.0, finish="length"),
    answer(1, "c", 0.0),
    answer(1, "d", 0.5),
    answer(2, "e", 1.0, failed="a reward failed"),
]


@pytest.mark.parametrize(
    ("keep", "least", "expected"),
    [
        ("right", 1.0, ["a", "b"]),
        ("right", None, ["a", "b", "c", "d"]),
        ("best", None, ["b", "d"]),
        ("best", 1.0, ["b"]),
        ("right", 2.5, []),
    ],
)
def test_which_samples_become_rows(keep: str, least: float | None, expected: list[str]) -> None:
    assert [sample["response"] for sample in picked(SAMPLES, keep, least)] == expected


def test_rows_are_counted_and_none_at_all_is_refused(tmp_path: Path) -> None:
    answers, rows = tmp_path / "answers.jsonl", tmp_path / "rows.jsonl"
    answers.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    assert write_rows(answers, rows, "right", 1.0) == "2 rows of 7 samples of 3 prompts"
    first = json.loads(rows.read_text().splitlines()[0])
    assert first == {"prompt": "p0", "response": "a", "data_source": "s", "reward": 1.0}
    with pytest.raises(DataError, match=r"0 rows of 7 samples of 3 prompts: no sample is whole and has .* 5 or more"):
        write_rows(answers, rows, "right", 5.0)


def test_the_table_of_all_evaluations_has_a_column_a_data_set_and_metric() -> None:
    one = {"val/accuracy": 0.5, "val/accuracy/source": 0.25, "time/validate": 3.0}
    text = wide_table({"early": {"sft": {"x": one, "y": {"val/loss": 1.0}}}, "late": {"grpo": {"x": one}}})
    assert text.splitlines() == [
        "stage,model,x accuracy,x accuracy/source,y loss",
        "early,sft,0.5,0.25,1.0",
        "late,grpo,0.5,0.25,",
    ]


def test_the_table_has_a_row_a_model_and_data_set() -> None:
    one = {"val/accuracy": 0.5, "val/accuracy/source": 0.25, "time/validate": 3.0}
    text = table({"sft": {"x": one, "y": {"val/loss": 1.0}}, "grpo": {"x": one}})
    assert text.splitlines() == [
        "| model | data | accuracy | loss |",
        "| --- | --- | --- | --- |",
        "| sft | x | 0.5 |  |",
        "| sft | y |  | 1 |",
        "| grpo | x | 0.5 |  |",
    ]
