"""Validation: each row counts once whatever the batch, and the metrics of several samples a row."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cluster.handles import InProcess
from megatron_rl.data.prompts import PromptSet
from megatron_rl.rewards.base import RewardResult
from megatron_rl.rollout.engine import Request
from megatron_rl.runs.summary import summary_lines
from megatron_rl.runs.validation import (
    extract_answer,
    majority_score,
    pass_at_k,
    row_metrics,
    validate_prompts,
    validation_metrics,
)
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import EngineAnswer, Prompt, Rollout, RolloutGroup, Rollouts, Samples, Texts
from megatron_rl.workers.engine import EngineWorker
from tests.helpers.config import load
from tests.helpers.rollouts import rollouts_of


def group(index: int, texts: list[str], source: str = "s") -> RolloutGroup:
    rollouts = tuple(Rollout((1,) * len(text), (0.0,) * len(text), "stop", text) for text in texts)
    return RolloutGroup(Prompt(index, (1,), "p", source, "9"), rollouts, 0)


def scored(groups: list[RolloutGroup]) -> list[RewardResult]:
    return [RewardResult(float(extract_answer(r.text) == "9")) for one in groups for r in one.rollouts]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_passed_sample(n: int, data: st.DataObject):
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([i < passed for i in range(n)], k))
    assert pass_at_k(n, passed, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))), abs=1e-15)


def test_pass_at_k_of_many_samples_is_exact():
    assert pass_at_k(1000, 0, 100) == 0.0 and pass_at_k(1000, 1000, 1) == 1.0
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1, abs=1e-15)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["9", "9", "8"], [1, 1, 0], 1.0),
        (["9", "8", "8"], [1, 0, 0], 0.0),
        (["9", "8"], [1, 0], 0.5),
        (["9", "9", "8", "8", "7"], [1, 1, 0, 0, 0], 0.5),
        (["9", "8", "7"], [1, 0, 0], 1 / 3),
        (["9", "9"], [1, 0.5], 0.75),
    ],
)
def test_the_majority_answer_is_scored_and_ties_are_their_expectation(
    answers: list[str], scores: list[float], expected: float
):
    assert majority_score(scores, answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}} = 3", r"\frac{1}{2}"),
        (r"\boxed{4} and \boxed{5", "4"),
        ("<answer>a</answer> 3 <answer> b\n</answer> 7", "b"),
        ("2 + 2\n#### 1,234\nand 5", "1234"),
        ("first 3, then -1,200.50.", "-1200.50"),
        (" yes ", "yes"),
        ("", ""),
    ],
)
def test_what_a_response_answers(text: str, answer: str):
    assert extract_answer(text) == answer


def test_metrics_of_several_samples_by_source():
    groups = [group(0, ["9", "9", "8", "9"], "a"), group(1, ["8", "8", "9", "1"], "b"), group(2, ["0"] * 4, "b")]
    metrics = validation_metrics(rollouts_of(groups), scored(groups))
    assert metrics["val/accuracy"] == metrics["val/avg@4"] == pytest.approx(4 / 12)
    assert metrics["val/accuracy/a"] == 0.75 and metrics["val/avg@4/b"] == pytest.approx(1 / 8)
    assert metrics["val/pass@1"] == pytest.approx(metrics["val/accuracy"])
    assert metrics["val/pass@2/b"] == pytest.approx((1 / 2 + 0) / 2) and metrics["val/pass@4"] == pytest.approx(2 / 3)
    assert metrics["val/maj@4"] == pytest.approx(1 / 3) and metrics["val/maj@4/a"] == 1.0
    assert (metrics["val/num_rows"], metrics["val/num_samples"]) == (3.0, 12.0)
    assert {name for name in row_metrics([1.0] * 6, ["9"] * 6, 1.0) if "pass" in name} == {
        f"val/pass@{k}" for k in (1, 2, 4, 6)
    }


def test_one_sample_a_row_gives_accuracy_alone():
    groups = [group(0, ["9"]), group(1, ["8"])]
    metrics = validation_metrics(rollouts_of(groups), scored(groups))
    assert metrics["val/accuracy"] == 0.5 and not [name for name in metrics if "@" in name or name.endswith("/s")]


def test_a_sample_passes_at_pass_score():
    """Rewards that give a wrong answer a little (0.01, say) pass by it only where that is asked for."""
    assert row_metrics([0.01, 0.01], ["a", "b"], 1.0)["val/pass@2"] == 0.0
    assert row_metrics([0.6, 0.01], ["a", "b"], 0.5)["val/pass@2"] == 1.0


class Engines:
    """Two engines that answer by prompt and seed alone, and remember how many prompts they were given at once."""

    grid = SimpleNamespace(num_engines=2)

    def __init__(self) -> None:
        self.batches: list[int] = []

    def all(self, method: Any, version: int, expect_change: bool) -> None:
        assert method is EngineWorker.publish

    def each_engine(self, method: Any, requests: list[list[Request]], sampling: Any) -> list[EngineAnswer]:
        assert method is EngineWorker.generate
        self.batches.append(sum(map(len, requests)))

        def token(request: Request, sample: int) -> int:
            assert request.seed is not None
            return (request.token_ids[0] * 31 + request.seed + sample) % 5

        answers = [[[token(r, i)] for r in engine for i in range(sampling.n)] for engine in requests]
        samples = [Samples.from_lists(ids, [[0.0]] * len(ids), ["stop"] * len(ids), 0) for ids in answers]
        texts = [Texts.of(list(map(str, ids))) for ids in answers]
        return [EngineAnswer.of(s, InProcess(s), InProcess(t)) for s, t in zip(samples, texts, strict=True)]


class Stops:
    """A renderer with a stop token."""

    def stops(self, texts: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return (0,), ()


@pytest.mark.parametrize(("size", "batches"), [(None, [7]), (7, [7]), (3, [3, 3, 1]), (1, [1] * 7), (100, [7])])
def test_each_row_is_validated_once_whatever_the_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, batches: list[int]
):
    """R4: an uneven last batch neither drops nor repeats a row, and the samples are those of one batch."""
    settings = ["rollout.val.n=4", "rollout.val.temperature=1.0", "rollout.val.pass_score=4.0", "trainer.seed=3"]
    settings += ["data.max_response_length=4", "rollout.seed_per_sample=true", f"data.val_batch_size={size or 'null'}"]
    parts, engines = Parts(load(tmp_path, *settings)), Engines()
    parts.sampler.start(engines, Stops())  # type: ignore[arg-type]
    seen: list[int] = []

    def reward(rollouts: Rollouts) -> list[RewardResult]:
        seen.extend(prompt.index for prompt in rollouts.prompts)
        ids, _ = rollouts.refs(range(rollouts.num_sequences)).fetch()
        return [RewardResult(float(of_sample[0])) for of_sample in ids]

    monkeypatch.setattr(parts.rewards, "score", reward)
    prompts = tuple(Prompt(2 * i, (i + 1,), "p", "ab"[i % 2], None) for i in range(7))
    metrics = validate_prompts(parts, prompts, 5).metrics
    assert (engines.batches, seen) == (batches, [0, 2, 4, 6, 8, 10, 12])
    assert metrics["val/num_rows"] == 7.0 and metrics["val/num_samples"] == 28.0
    whole = load(tmp_path, *settings, "data.val_batch_size=null")
    parts.cfg = whole
    assert validate_prompts(parts, prompts, 5).metrics == metrics
    assert not math.isclose(metrics["val/accuracy"], 0.0)


def test_a_run_says_what_became_of_its_rows_and_who_is_in_the_mix():
    """R6"""
    train = PromptSet(tuple(Prompt(i, (1,), "p", "ab"[i // 3], None) for i in range(4)), 9, 5, 1, num_cached=9)
    val = PromptSet((Prompt(0, (1,), "p", "a", None),), 1, 0, 0)
    assert summary_lines({"train": train, "val": val}, {"a": 0.5, "b": 1.5}) == [
        "train: 9 rows, 5 left out and 1 cut for length; tokens of 9 rows were kept from an earlier run",
        "train: a 3 rows for 25.0% of the samples, b 1 rows for 75.0% of the samples",
        "val: 1 rows, 0 left out and 0 cut for length",
    ]
    assert summary_lines({"val": train}, {})[1] == "val: a 3 rows, b 1 rows"
