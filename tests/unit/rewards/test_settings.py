"""Scores that are no finite number, or too large to train on, are failures wherever they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.checks.reward import RewardPlan
from megatron_rl.config.checks.reward_terms import LARGEST_SCORE, ConstantTerm, Reward, Term
from megatron_rl.config.sections.reward import JudgeConfig, RewardConfig, RewardModelConfig
from megatron_rl.errors import RewardError
from megatron_rl.experience.scoring import scores_of
from megatron_rl.rewards.base import RewardResult, RewardSample, to_result, to_results
from megatron_rl.rewards.compose import Results, score_by_source
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.workers.judge import read_score
from megatron_rl.workers.reward_model import RewardModelPlan, RewardModelWorker
from tests.helpers.config import base_settings, load, only_fault

SAMPLES = [RewardSample("s", "", text, "9") for text in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (math.nan, "returned nan -- return a finite number"),
        (-math.inf, "returned -inf -- return a finite number"),
        (1e308, "at most 1e+12 in magnitude"),
        (-1.5e12, "at most 1e+12 in magnitude"),
        (3.5e38, "at most 1e+12"),
        (10**400, "at most 1e+12"),
        pytest.param(10**9999, "at most 1e+12", id="ten to the 9999"),
        (np.float32("inf"), "finite"),
        (np.float64("nan"), "finite"),
        (np.array(np.nan), "finite"),
        (np.float16("inf"), "finite"),
        (torch.tensor(float("nan")), "finite"),
        (torch.tensor(1e30), "at most 1e+12"),
        (torch.tensor([1.0, 2.0]), "return a number"),
        (torch.tensor([1.0]), "return a number"),
        (np.array([0.5]), "return a number"),
        (complex(1, 0), "(complex) -- return a number"),
        ("nan", "'nan' (str) -- return a number"),
        ("1.0", "'1.0' (str) -- return a number"),
        ("", "'' (str) -- return a number"),
        (b"1", "(bytes) -- return a number"),
        ((1.0, "why"), "(tuple) -- return a number"),
        ([1.0], "(list) -- return a number"),
        ({}, "a dict without 'score'"),
        ({"score": math.inf}, "returned as 'score' inf -- return a finite"),
        ({"score": None}, "None, which is no score"),
        ({"score": 1.0, "acc": math.nan}, "returned as 'acc' nan -- return a finite"),
        ({"score": 1.0, "long": 1e300}, "returned as 'long' 1e+300 -- return a number of at most"),
        ({"score": {"score": 1}}, "(dict) -- return a number"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_rewards_name(returned: object, reason: str):
    with pytest.raises(RewardError) as error:
        to_result(returned, "mine.py:fn")
    assert str(error.value).startswith("reward mine.py:fn returned") and reason in str(error.value)
    found = to_results([1.0, returned], 2, "mine.py:fn", failed_score=-1.0)
    assert found[0] == RewardResult(1.0) and found[1] is not None
    assert found[1].value == -1.0 and reason in str(found[1].failed)


@pytest.mark.parametrize("value", [LARGEST_SCORE, -LARGEST_SCORE, 5e-324, True, np.int64(7), torch.tensor(-0.5)])
def test_the_largest_scores_are_scores(value: Any):
    assert to_result(value, "fn") == RewardResult(float(value))


@pytest.mark.parametrize("as_what", [list, np.array, torch.tensor])
def test_one_bad_answer_of_a_batch_fails_alone(as_what: Any):
    found = to_results(as_what([0.5, math.nan, 1e20]), 3, "fn", failed_score=0.0)
    assert [result.failed is None for result in found if result is not None] == [True, False, False]


def test_a_pool_fails_the_sample_and_no_other(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "BAD = {'a': float('nan'), 'b': 1e308}\n"
        "def single(solution_str):\n    return BAD.get(solution_str, 1.0)\n"
        "def batch(solution_strs):\n    return [single(text) for text in solution_strs]\n"
        "class Whole:\n    def __call__(self, samples):\n        return batch([s.solution_str for s in samples])\n"
    )
    for name in ("single", "batch", "Whole"):
        with RewardPool(f"{file}:{name}", num_workers=1, failed_score=-2.0) as pool:
            results = pool.score(SAMPLES)
        assert [result.value for result in results if result] == [-2.0, -2.0, 1.0]
        assert "finite" in str(results[0] and results[0].failed) and "at most" in str(results[1] and results[1].failed)


def scored_by(value: float) -> Any:
    def score(reward: Reward, samples: Sequence[RewardSample]) -> Results:
        return [RewardResult(value) for _ in samples]

    return score


@pytest.mark.parametrize(
    ("term", "value", "reason"),
    [
        (Reward("model"), math.nan, "model gave nan -- return a finite number"),
        (Reward("judge"), -math.inf, "judge gave -inf"),
        (1e308 * Reward("a") + 1e308 * Reward("b"), 1.0, "the reward gave inf"),
        (1e308 * Reward("a") - 1e308 * Reward("b"), 10.0, "the reward gave nan"),
        (1e6 * Reward("a"), 1e7, "the reward gave 10000000000000.0 -- return a number of at most 1e+12"),
        (Reward("a") | ConstantTerm(math.inf), math.inf, "a gave inf"),
        (ConstantTerm(math.nan), 0.0, "the reward gave nan"),
        (0.0 * Reward("a") + 1.0, math.inf, "a gave inf"),
    ],
)
def test_a_composition_that_is_not_finite_fails_its_samples(term: Term, value: float, reason: str):
    for result in score_by_source(term, {}, SAMPLES, scored_by(value), -3.0):
        assert result.value == -3.0 and reason in str(result.failed)


def test_a_number_beside_a_models_score_that_is_not_finite_fails_it():
    def score(reward: Reward, samples: Sequence[RewardSample]) -> Results:
        return [RewardResult(1.0, {"margin": math.nan}) for _ in samples]

    (result,) = score_by_source(Reward("model"), {}, SAMPLES[:1], score, 0.0)
    assert result.failed == "model gave 'margin' as nan -- return a finite number"


def test_a_reward_models_logits_that_are_not_finite_are_failures(monkeypatch: pytest.MonkeyPatch):
    worker = object.__new__(RewardModelWorker)
    worker._cfg, worker._plan = RewardModelConfig(), RewardModelPlan("cpu", -1.0, True)
    worker._max_length = 8
    logits = [0.5, math.nan, -math.inf, 1e30]
    monkeypatch.setattr(worker, "_forward", lambda rows: logits[: len(rows)])
    results = worker.score([RewardSample("s", "", "x", None, response_ids=(1,)) for _ in logits])
    assert [result.value for result in results] == [0.5, -1.0, -1.0, -1.0]
    assert results[1].failed == "the reward model gave nan -- return a finite number" and results[0].failed is None


@pytest.mark.parametrize("text", ["score: 1e999", "score: nan", "score: -inf", "score: 11"])
def test_a_judges_score_that_is_not_finite_or_outside_is_a_failure(text: str):
    import re

    cfg = JudgeConfig(score_pattern=r"score: (\S+)")
    result = read_score(text, re.compile(cfg.score_pattern), cfg, -1.0)
    assert result.value == -1.0 and "is not from 0 to 10" in str(result.failed) and math.isfinite(result.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e13])
def test_a_flows_own_reward_node_is_looked_at(value: float):
    with pytest.raises(RewardError, match=r"reward node gave .* to sequence 1 of the batch"):
        scores_of([RewardResult(1.0), RewardResult(value)], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("setting", "key", "reason"),
    [
        ("reward.failed_score=.inf", "reward.failed_score", "finite"),
        ("reward.failed_score=nan", "reward.failed_score", ""),
        ("reward.failed_score=-1e308", "reward.failed_score", "too large for a number of 32 bits"),
        ("reward.failed_score=-1e13", "reward.failed_score", "larger than 1e+12"),
        ("reward.function='numeric | 1e999'", "reward.function", "its number inf is not finite"),
        ("reward.function='numeric + 1e300 * exact_match'", "reward.function", "its number 1e+300 is larger than"),
        ("reward.by_source={s: 'numeric - 1e13'}", "reward.by_source.s", "larger than 1e+12"),
        ("reward.judge.highest=.inf", "reward.judge.highest", "finite"),
        ("reward.judge.lowest=-.inf", "reward.judge.lowest", "finite"),
    ],
)
def test_numbers_of_the_section_are_finite(tmp_path: Path, setting: str, key: str, reason: str):
    fault = only_fault(tmp_path, setting)
    assert fault.key == key and reason in fault.reason and fault.cure


def test_scores_of_the_section_may_be_negative(tmp_path: Path):
    base_settings(tmp_path)
    assert load(tmp_path, "reward.failed_score=-1").reward.failed_score == -1.0


def test_a_plan_made_in_python_is_checked_as_it_is_scored():
    plan = RewardPlan(ConstantTerm(1e40), {})
    (result,) = score_by_source(plan.default, plan.by_source, SAMPLES[:1], scored_by(1.0), 0.0)
    assert result.failed is not None
    assert RewardConfig().failed_score == 0.0
