"""Turn GSM8K as it is published (columns question and answer) into verl's RL schema.

    python examples/gsm8k/make_data.py RAW_TRAIN.parquet RAW_TEST.parquet FOLDER

writes FOLDER/train.parquet and FOLDER/test.parquet. Rows, texts and columns are those of verl's own script
(examples/data_preprocess/gsm8k.py there): the question with the instruction behind it, and the number after #### as
ground truth. A row whose answer has no number after #### is an error that names it; nothing is left out.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FINAL = re.compile(r"#### (-?[0-9.,]+)")


def final_answer(answer: str) -> str | None:
    """The number after ####, without commas; None where there is none."""
    found = FINAL.search(answer)
    return found[1].replace(",", "") if found else None


def rl_row(row: dict[str, Any], split: str, index: int, where: str) -> dict[str, Any]:
    """One published row in verl's schema."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise SystemExit(f"{where}: no question and answer, columns {list(row)} -- give GSM8K as it is published")
    truth = final_answer(answer)
    if truth is None:
        raise SystemExit(f"{where}: no number after #### in {answer[-60:]!r} -- repair the row")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def convert(raw: Path, split: str, out: Path) -> int:
    """Write the rows of `raw` to `out`; return their number."""
    rows = pq.read_table(raw).to_pylist()
    table = pa.Table.from_pylist([rl_row(row, split, i, f"{raw} row {i + 1}") for i, row in enumerate(rows)])
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    pq.write_table(table, part)
    os.replace(part, out)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn GSM8K as it is published into verl's RL schema.")
    parser.add_argument("raw_train", type=Path)
    parser.add_argument("raw_test", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for split, raw in (("train", arguments.raw_train), ("test", arguments.raw_test)):
        out = arguments.folder / f"{split}.parquet"
        print(f"{out}: {convert(raw, split, out)} rows")


if __name__ == "__main__":
    main()
