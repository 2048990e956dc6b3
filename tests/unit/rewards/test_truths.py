"""Rows that their reward cannot score, and data sources without a reward, are told before the run, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.checks.reward import plan_rewards
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.errors import DataError
from megatron_rl.experience.scoring import RunRewards
from megatron_rl.rewards.base import RewardSample
from megatron_rl.rewards.scorer import RewardScorer
from megatron_rl.rewards.truths import refuse_unscorable
from tests.helpers.config import load
from tests.helpers.data import quickstart


def faults_of(samples: list[RewardSample], function: str, **by_source: str) -> str:
    """The error's text; empty where all rows can be scored."""
    plan, _ = plan_rewards(RewardConfig(function=function, by_source=by_source))
    assert plan is not None
    try:
        refuse_unscorable(plan.default, plan.by_source, samples, function)
    except DataError as error:
        return str(error)
    return ""


def row(truth: Any, source: str = "s", number: int = 1, **fields: Any) -> RewardSample:
    return RewardSample(source, "", "", truth, where=f"d.jsonl row {number}", **fields)


@pytest.mark.parametrize(
    ("function", "source", "truth", "reason"),
    [
        *((f, "s", None, "there is no ground truth") for f in ("exact_match", "numeric", "math", "reasoning_gym")),
        ("code", "s", None, "no ground truth"),
        ("exact_match", "s", ["a"], "is a list"),
        ("exact_match", "s", {"a": 1}, "is a dict"),
        ("numeric", "s", "nine", "the ground truth 'nine' is no number"),
        ("numeric", "s", "", "the ground truth '' is no number"),
        ("numeric", "s", "5 apples", "is no number"),
        ("numeric", "s", "nan", "is no number"),
        ("numeric", "s", float("inf"), "is no number"),
        ("numeric", "s", True, "is no number"),
        ("numeric", "s", [1], "is no number"),
        ("math", "s", "", "holds no letter and no digit"),
        ("math", "s", "...", "holds no letter"),
        ("math", "s", r"\frac{1}{2", "braces that do not close"),
        ("math", "s", "}{1", "braces that do not close"),
        ("math", "s", ["1"], "is a list"),
        ("code", "s", "assert f( == 3", "tests that are no Python"),
        ("code", "s", {"inputs": ["1"], "outputs": []}, "has no tests"),
        ("code", "s", {"inputs": [], "outputs": []}, "has no tests"),
        ("code", "s", [{"input": "1"}], "has no 'output'"),
        ("code", "s", 3, "is a int"),
        ("reasoning_gym", "s", "1", "extra_info.metadata is no JSON"),
        ("data_source", "openai/gsm8k", None, "no ground truth"),
        ("data_source", "openai/gsm8k", "1,234", "is no number of digits alone"),
        ("data_source", "openai/gsm8k", "$5", "is no number of digits alone"),
        ("data_source", "openai/gsm8k", "five", "is no number of digits alone"),
        ("data_source", "lighteval/MATH", "", "or an empty one"),
        ("data_source", "math_dapo", ["34"], "is no text"),
        ("data_source", "searchR1_nq", "Beatles", "no {'target'"),
        ("data_source", "searchR1_nq", {"target": []}, "no {'target'"),
        ("data_source", "searchR1_nq", {"target": [1]}, "no {'target'"),
        ("data_source", "taco", "not json", "is no JSON"),
        ("data_source", "apps", "[]", "is a list"),
        ("data_source", "codecontests", {"inputs": [1], "outputs": [], "fn_name": "f"}, "no lists of one length"),
        ("data_source | exact_match", "aime2024", None, "no ground truth"),
        ("default", "openai/gsm8k", "1,000", "is no number of digits alone"),
        ("numeric + 0.1 * format", "s", "x", "is no number"),
        ("0.5 * math - 1 | exact_match", "s", "}", "no letter"),
    ],
)
def test_a_truth_that_a_reward_cannot_use_is_named_with_its_row_and_the_cure(
    function: str, source: str, truth: Any, reason: str
):
    extra = {"metadata": "{"} if function == "reasoning_gym" else {}
    good = {"numeric": "9", "math": "9", "exact_match": "9"}.get(function)
    samples = [row(good or truth, source, 1, extra_info=extra), row(truth, source, 2, extra_info=extra)]
    text = faults_of(samples, function)
    assert reason in text and "d.jsonl row 2" in text and f"{1 if good else 2} of 2 rows cannot be scored" in text
    assert " -- " in text or "must be lists" in text


@pytest.mark.parametrize(
    ("function", "source", "truth"),
    [
        ("exact_match", "s", 9),
        ("exact_match", "s", ""),
        ("numeric", "s", "1,234"),
        ("numeric", "s", 0.5),
        ("numeric", "s", "1/2"),
        ("math", "s", r"\{1, 2\}"),
        ("math", "s", "x^{2}"),
        ("code", "s", "assert f(1) == 2"),
        ("regex", "s", None),
        ("format", "s", None),
        ("data_source", "openai/gsm8k", "-12.5"),
        ("data_source", "searchR1_nq", {"target": "a"}),
        ("data_source", "taco", json.dumps({"inputs": ["1"], "outputs": ["2"]})),
        ("mine.py:fn | numeric", "s", "no number, and never asked"),
        ("data_source | numeric", "openai/gsm8k", "5"),
    ],
)
def test_truths_that_can_be_used_pass(function: str, source: str, truth: Any):
    assert faults_of([row(truth, source)], function) == ""


def test_every_row_is_looked_at_and_the_first_ten_are_shown():
    samples = [row("9" if number % 2 else "x", number=number) for number in range(60)]
    text = faults_of(samples, "numeric")
    assert text.startswith("30 of 60 rows cannot be scored") and text.count("d.jsonl row") == 10 and "20 more" in text


def test_an_unknown_source_lists_choices_cures_and_its_rows():
    samples = [row("9", "add2", 1), row("9", "openai/gsm8k", 2), row("9", "add2", 3), row("9", "words", 4)]
    text = faults_of(samples, "data_source")
    assert "no rule for the data source 'add2' (2 rows, the first is d.jsonl row 1)" in text and "'words'" in text
    for cure in ("reward.by_source", "reward.function", "openai/gsm8k", "searchR1_nq", "aime*", "exact_match, math"):
        assert cure in text
    assert "no rule for the data source 'add2' (2 rows" in faults_of(samples, "default", words="numeric")
    assert faults_of(samples, "data_source", add2="numeric", words="exact_match") == ""
    assert faults_of(samples, "numeric") == ""
    assert "by_source.words: verl has no rule" in faults_of(samples, "numeric", words="data_source")


def test_a_files_name_is_no_declared_source():
    stem = row("7", "aime2024", has_source=False)
    text = faults_of([stem], "data_source")
    assert (
        "1 row, the first is d.jsonl row 1 name no data_source" in text and "name a reward in reward.function" in text
    )
    assert faults_of([stem], "data_source | exact_match") == "" == faults_of([stem], "default")
    with RewardScorer(RewardConfig()) as scorer:
        asked = [row("7", "aime2024", has_source=False), row("7", "aime2024")]
        results = scorer.score([RewardSample(**{**one.__dict__, "solution_str": "7"}) for one in asked])
    assert [result.value for result in results] == [1.0, -1.0]


def test_a_scorer_refuses_before_it_scores(tmp_path: Path):
    trace = tmp_path / "called"
    file = tmp_path / "mine.py"
    file.write_text(f"def fn(solution_str):\n    open({str(trace)!r}, 'w').close()\n    return 1.0\n")
    cfg = RewardConfig(function="numeric", by_source={"mine": f"{file}:fn"}, num_workers=1)
    with RewardScorer(cfg) as scorer, pytest.raises(DataError, match=r"1 of 2 rows .*\n  d\.jsonl row 1: .* no number"):
        scorer.check_rows([row("x"), row("9", "mine")])
    assert not trace.exists()


def test_the_first_lines_say_which_rule_scores_a_source_that_the_config_does_not_name():
    samples = [row("7", "openai/gsm8k"), row("7", "openai/gsm8k"), row("7", "train", has_source=False), row("7", "own")]
    cfg = RewardConfig(by_source={"own": "numeric"})
    with RewardScorer(cfg) as scorer:
        assert scorer.notes(samples) == [
            "openai/gsm8k is scored by verl's rule for it (gsm8k)",
            "rows of train name no data_source, and are scored by exact_match",
        ]
    with RewardScorer(RewardConfig(function="numeric")) as scorer:
        assert scorer.notes(samples) == []


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([{"data_source": "add2"}], [], ["no rule for the data source 'add2' (1 row", "rows.jsonl row 1", "by_source"]),
        ([{"answer": "x"}, {}, {"answer": "y"}], ["reward.function=numeric"], ["2 of 3 rows", "row 1", "row 3"]),
        ([{"data_source": "openai/gsm8k", "answer": "1,234"}], [], ["row 1", "no number of digits alone"]),
        ([{"data_source": "taco", "answer": "{}"}], [], ["row 1", "no lists of one length"]),
    ],
)
def test_a_run_is_refused_before_workers_start_and_writes_nothing(
    tmp_path: Path, rows: list[dict[str, str]], settings: list[str], said: list[str]
):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "4+5=", "answer": "9", **row}) + "\n" for row in rows))
    cfg = load(tmp_path, *settings)
    renderer = Renderer(tokenizer_path=str(quickstart() / "model"), chat_template="plain")
    prompts = load_prompts(cfg.data, [str(data)], renderer).prompts
    before = sorted(tmp_path.rglob("*"))
    rewards = RunRewards(cfg)
    rewards.start()
    try:
        with pytest.raises(DataError) as error:
            rewards.preflight(prompts)
    finally:
        rewards.close()
    for part in said:
        assert part in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before
