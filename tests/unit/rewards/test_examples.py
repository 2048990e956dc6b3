"""Reward files as their users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.load import load_reward
from megatron_rl.rewards.scorer import RewardScorer
from tests.helpers.data import ROOT

SERVICE = ROOT / "examples" / "customer_service"
VERL_FILE = """
import re


def extract_solution(solution_str, method="strict"):
    solutions = re.findall("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    return solutions[-1].replace(",", "") if solutions else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict", score=1.0):
    answer = extract_solution(solution_str, method)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": None}
    return {"score": score if answer == ground_truth else 0.0, "acc": answer == ground_truth, "pred": answer}
"""


def test_a_file_with_verls_signature_runs_unchanged(tmp_path: Path):
    file = tmp_path / "gsm8k.py"
    file.write_text(VERL_FILE)
    samples = [RewardSample("openai/gsm8k", "", text, "72") for text in ("so #### 72", "so #### 71", "no answer")]
    with RewardScorer(RewardConfig(function=f"{file}:compute_score", kwargs={"score": 2.0})) as scorer:
        results = scorer.score(samples)
    assert [(result.value, result.extra["acc"], result.failed) for result in results] == [
        (2.0, 1.0, None),
        (0.0, 0.0, None),
        (0.0, 0.0, None),
    ]


@pytest.mark.parametrize(
    ("text", "score", "parts"),
    [
        ("Thank you, parcel 4417 arrives in two working days.", 0.7, {"polite": 1, "forbidden": 0, "facts": 1}),
        ("Sorry, please wait. Thanks!", 0.3, {"polite": 3, "forbidden": 0, "facts": 0}),
        ("Calm down, 4417 is late.", -0.2, {"polite": 0, "forbidden": 1, "facts": 0.5}),
        ("Whatever. Calm down. Not my problem. You should have waited.", -1.0, {"forbidden": 4, "clipped": 1}),
        ("Thankless whateverism", 0.0, {"polite": 0, "forbidden": 0}),
    ],
)
def test_the_customer_service_reward_weighs_words_phrases_and_facts(text: str, score: float, parts: dict[str, float]):
    facts = {"facts": ["4417", "(2|two) (working|business) days"]}
    returned = load_reward(f"{SERVICE / 'reward.py'}:compute_score")(RewardSample("s", "", text, "", facts))
    assert isinstance(returned, dict)
    assert returned["score"] == pytest.approx(score)
    assert {name: returned[name] for name in parts} == parts


def test_long_answers_cost():
    reward = load_reward(f"{SERVICE / 'reward.py'}:compute_score", {"most_words": 10})
    returned = reward(RewardSample("s", "", "word " * 30, "", {}))
    assert isinstance(returned, dict) and returned["score"] == pytest.approx(0.6 - 0.2)
