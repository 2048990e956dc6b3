"""The data that the examples write: valid, without repeats, the same each time, and worth its reward."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.load import load_reward
from tests.helpers.data import ROOT

SERVICE = ROOT / "examples" / "customer_service"
GYM = str(ROOT / "examples" / "reasoning_gym" / "make_data.py")


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def questions(folder: Path, name: str) -> list[str]:
    return [repr(row["prompt"]) for row in rows_of(folder, name)]


def check_files(make: Any, folder: Path) -> None:
    """Counts are the files', no prompt stands twice in or across them, and the same arguments give the same bytes."""
    counts, again = make(folder / "a"), make(folder / "b")
    assert counts == again
    for name, count in counts.items():
        assert pq.read_metadata(folder / "a" / name).num_rows == count
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    both = questions(folder / "a", "train") + questions(folder / "a", "val")
    assert len(set(both)) == len(both)


def sample(row: dict[str, Any], response: str) -> RewardSample:
    return RewardSample(
        data_source=row["data_source"],
        prompt_text="",
        solution_str=response,
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=row["extra_info"],
    )


def test_customer_service_rows_hold_the_facts_that_their_reward_looks_for(tmp_path: Path):
    make = runpy.run_path(str(SERVICE / "make_data.py"))["make"]
    check_files(lambda folder: make(folder, 60, 20, 0), tmp_path)
    reward: Any = load_reward(f"{SERVICE / 'reward.py'}:compute_score", {})
    topics: set[str] = set()
    for row in rows_of(tmp_path / "a", "val"):
        facts, policy = row["extra_info"]["facts"], row["prompt"][0]["content"]
        assert row["prompt"][0]["role"] == "system" and row["prompt"][-1]["role"] == "user"
        assert facts and all(re.search(fact, policy, re.IGNORECASE) for fact in facts)
        topics.add(row["extra_info"]["topic"])
        stated = reward(sample(row, f"Thank you for asking. {policy.partition('Policy: ')[2]}"))
        assert stated["facts"] == 1.0 and reward(sample(row, "Whatever."))["facts"] == 0.0
    assert len(topics) == 4


def test_the_dialogues_written_by_hand_have_the_layout_of_those_that_are_drawn(tmp_path: Path):
    runpy.run_path(str(SERVICE / "make_data.py"))["make"](tmp_path, 20, 4, 0)
    (drawn, *_) = rows_of(tmp_path, "train")
    reward: Any = load_reward(f"{SERVICE / 'reward.py'}:compute_score", {})
    for line in (SERVICE / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row.keys() == drawn.keys() and row["extra_info"].keys() == drawn["extra_info"].keys()
        assert reward(sample(row, row["prompt"][0]["content"] + " parcel 4417"))["facts"] == 1.0


def test_reasoning_gym_rows_are_scored_by_their_task(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    module = runpy.run_path(GYM)
    check_files(lambda folder: module["make"](folder, "basic_arithmetic", module["TWO_NUMBERS"], 60, 20, 0), tmp_path)
    reward: Any = load_reward("reasoning_gym", {})
    for row in rows_of(tmp_path / "a", "val")[:5]:
        truth = row["reward_model"]["ground_truth"]
        assert row["data_source"] == "reasoning_gym/basic_arithmetic"
        assert json.loads(row["extra_info"]["metadata"])["source_dataset"] == "basic_arithmetic"
        assert reward(sample(row, truth)) == 1.0 and reward(sample(row, truth + "1")) < 1.0
    pairs = rows_of(tmp_path / "a", "sft_val")
    assert len(pairs[0]["prompt"]) <= 32 and len(pairs[0]["response"]) < 8
