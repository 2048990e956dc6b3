from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.rewards import REWARDS
from megatron_rl.errors import RewardError
from megatron_rl.rewards.base import RewardResult, RewardSample, to_result, to_results
from megatron_rl.rewards.load import load_reward
from tests.helpers.data import ROOT


def sample(solution: str = "9", truth: Any = "9", **fields: Any) -> RewardSample:
    return RewardSample(data_source="add2", prompt_text="4+5=", solution_str=solution, ground_truth=truth, **fields)


def score(spec: str, solution: str, truth: Any) -> object:
    return load_reward(spec)(sample(solution, truth))


def write(folder: Path, code: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


# The rewards of the registry


def test_the_rewards_that_have_a_name():
    names = ["code", "exact_match", "format", "math", "numeric", "reasoning_gym", "regex"]
    assert list(REWARDS) == [*names, "data_source", "default"]


@pytest.mark.parametrize(
    ("solution", "truth", "value"),
    [
        ("42", "42", 1),
        (" 42\n", "42", 1),
        ("42", 42, 1),
        ("042", "42", 0),
        ("", "42", 0),
        ("the 42", "42", 0),
    ],
)
def test_exact_match_compares_stripped_text(solution: str, truth: object, value: float):
    assert score("exact_match", solution, truth) == value


@pytest.mark.parametrize(
    ("solution", "truth", "value"),
    [
        ("4 and 5 make 9.", "9", 1),
        ("9 is not 10", "9", 0),
        ("it costs $1,234.00", "1234", 1),
        ("1234", "1,234", 1),
        ("-3", "-3", 1),
        ("10-3", "-3", 0),
        ("10-3", 3, 1),
        ("x=-3", -3, 1),
        ("pick 3,4", "4", 1),
        ("0.50", 0.5, 1),
        ("about .5", "0.5", 1),
        ("1e3", "1000", 1),
        ("no number", "9", 0),
    ],
)
def test_numeric_compares_the_last_number(solution: str, truth: object, value: float):
    assert score("numeric", solution, truth) == value


@pytest.mark.parametrize(
    ("solution", "truth", "value"),
    [
        ("The answer is $\\boxed{\\frac{1}{2}}$.", "0.5", 1),
        ("so 0.5", "\\frac{1}{2}", 1),
        ("\\boxed{x^2+1}", "1+x^2", 1),
        ("The answer is 41.", "42", 0),
        ("I do not know.", "42", 0),
    ],
)
def test_math_compares_expressions(solution: str, truth: object, value: float):
    assert score("math", solution, truth) == value


@pytest.mark.parametrize("name", ["exact_match", "numeric", "math"])
def test_a_missing_ground_truth_is_no_zero(name: str):
    with pytest.raises(ValueError, match="no ground truth"):
        score(name, "9", None)


def test_numeric_refuses_a_ground_truth_that_is_no_number():
    with pytest.raises(ValueError, match="'nine' is no number"):
        score("numeric", "9", "nine")


def test_rewards_import_no_torch():
    heavy = ("torch", "numpy", "ray", "sympy")
    code = f"import sys, megatron_rl.rewards.worker; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("solution", "pattern", "whole", "value"),
    [
        ("so 12 apples", r"\d+", False, 1),
        ("none", r"\d+", False, 0),
        (" 12\n", r"\d+", True, 1),
        ("12 apples", r"\d+", True, 0),
        ("a\nb", "a.b", True, 1),
    ],
)
def test_regex_finds_or_matches(solution: str, pattern: str, whole: bool, value: float):
    assert load_reward("regex", {"pattern": pattern, "whole": whole})(sample(solution)) == value


def test_regex_needs_a_pattern_that_is_one():
    with pytest.raises(RewardError, match="needs pattern"):
        load_reward("regex")
    with pytest.raises(ValueError, match="is no regular expression"):
        load_reward("regex", {"pattern": "("})(sample("x"))


@pytest.mark.parametrize(
    ("solution", "kwargs", "value"),
    [
        ("<think>4+5</think>\n<answer>9</answer>\n", {}, 1),
        ("<think>4+5</think> so <answer>9</answer>", {}, 0),
        ("<answer>9</answer><think>4+5</think>", {}, 0),
        ("<think>4+5</think><answer> </answer>", {}, 0),
        ("<think>a</think><answer>9</answer><answer>8</answer>", {}, 0),
        ("4+5</think><answer>9</answer>", {"opened": True}, 1),
        ("4+5</think><answer>9</answer>", {}, 0),
        ("<a>1</a>", {"tags": ["a"]}, 1),
        ("9", {}, 0),
    ],
)
def test_format_asks_for_each_tag_once_and_in_order(solution: str, kwargs: dict[str, Any], value: float):
    assert load_reward("format", kwargs)(sample(solution)) == value


def test_reasoning_gym_scores_by_the_task_itself():
    pytest.importorskip("reasoning_gym")
    entry = {"source_dataset": "basic_arithmetic", "expression": "5 - 3 - 6"}
    reward = load_reward("reasoning_gym")
    for info in (entry, {"metadata": entry}, {"metadata": json.dumps(entry)}):
        made = RewardSample("rg", "", "so\n<answer>-4</answer>", "-4", info)
        assert reward(made) == 1.0
        assert reward(replace(made, solution_str="-4")) == 1.0
        assert reward(replace(made, solution_str="<answer>7</answer>")) != 1.0
    assert reward(RewardSample("reasoning_gym/basic_arithmetic", "", "-4", "-4")) == 1.0
    with pytest.raises(ValueError, match="has no task 'add2'"):
        reward(sample("9"))


# Where a reward is found


def test_a_function_of_a_file_is_loaded(tmp_path: Path):
    path = write(tmp_path, "def length(sample):\n    return len(sample.solution_str)\n")
    assert load_reward(f"{path}:length")(sample("abc")) == 3


def test_a_file_may_define_dataclasses(tmp_path: Path):
    code = """
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Parsed:
            text: str

        def reward(sample):
            return float(Parsed(sample.solution_str).text == "9")
    """
    assert load_reward(write(tmp_path, code) + ":reward")(sample("9")) == 1.0


def test_a_function_of_a_module_is_loaded():
    assert load_reward("megatron_rl.rewards.text:exact_match")(sample("9")) == 1.0


def test_verl_form_is_called_by_name_with_kwargs(tmp_path: Path):
    code = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
            return {"score": scale, "seen": [data_source, solution_str, ground_truth, extra_info]}

        def short(ground_truth, solution_str):
            return solution_str == ground_truth

        def anything(solution_str, **others):
            return {"score": 1, "names": sorted(others)}
    """
    path = write(tmp_path, code)
    returned = load_reward(f"{path}:compute_score", {"scale": 2.0})(sample("9", extra_info={"a": 1}))
    extra_info = {"num_turns": 2, "rollout_reward_scores": {}, "a": 1}
    assert returned == {"score": 2.0, "seen": ["add2", "9", "9", extra_info]}
    assert load_reward(f"{path}:short")(sample("9")) is True
    names = ["data_source", "extra_info", "ground_truth", "more"]
    assert load_reward(f"{path}:anything", {"more": 1})(sample()) == {"score": 1, "names": names}


def test_sample_form_takes_kwargs_and_callable_instances(tmp_path: Path):
    code = """
        def scaled(sample, scale=1.0):
            return scale * len(sample.solution_str)

        class Counter:
            def __call__(self, sample):
                return sample.num_tokens

        counter = Counter()
    """
    path = write(tmp_path, code)
    assert load_reward(f"{path}:scaled", {"scale": 0.5})(sample("abcd")) == 2.0
    assert load_reward(f"{path}:counter")(sample(num_tokens=7)) == 7


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("exact_mach", "did you mean 'exact_match'"),
        ("nothing_like_it", "use one of code, exact_match, format, math, numeric"),
        (":fn", "write package.module:function"),
        (
            "no_such_module_here:fn",
            "does not import (ModuleNotFoundError: No module named 'no_such_module_here')",
        ),
        ("megatron_rl.rewards.text:exact_macht", "did you mean 'exact_match'"),
        ("no/such/file.py:fn", "there is no file"),
        ("megatron_rl.rewards.pool:LARGEST_CHUNK", "is not callable, but a int"),
        ("megatron_rl.rewards.base:RewardSample", "is a class without __call__"),
    ],
)
def test_a_reward_that_cannot_be_found_is_an_error(spec: str, reason: str):
    with pytest.raises(RewardError) as error:
        load_reward(spec)
    assert reason in str(error.value) and repr(spec) in str(error.value)


def test_a_file_that_does_not_import_shows_its_error(tmp_path: Path):
    path = write(tmp_path, "import no_such_package\n")
    with pytest.raises(RewardError, match=r"does not import \(ModuleNotFoundError: No module named 'no_such_package'"):
        load_reward(f"{path}:fn")
    path = write(tmp_path, "def fn(:\n")
    with pytest.raises(RewardError, match=r"does not import \(SyntaxError"):
        load_reward(f"{path}:fn")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def fn():\n    return 1\n", "accepted forms: fn(data_source, solution_str"),
        ("def fn(sample, other):\n    return 1\n", "needs other, which nothing gives -- accepted forms"),
        (
            "def fn(solution_str, reference):\n    return 1\n",
            "needs reference, which nothing gives -- accepted forms",
        ),
        ("async def fn(sample):\n    yield 1\n", "yields"),
        ("fn = 3\n", "is not callable, but a int -- accepted forms"),
    ],
)
def test_a_function_of_neither_form_is_an_error_that_lists_both(tmp_path: Path, code: str, reason: str):
    with pytest.raises(RewardError) as error:
        load_reward(write(tmp_path, code) + ":fn")
    assert reason in str(error.value)


def test_an_unknown_keyword_is_an_error():
    with pytest.raises(RewardError, match=r"reward\.kwargs: tolerance -- numeric takes no such keyword"):
        load_reward("numeric", {"tolerance": 1})


# What a reward returns


@pytest.mark.parametrize(
    ("returned", "value"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(0.25), 0.25), (np.bool_(True), 1.0), (np.array(2), 2.0)],
)
def test_numbers_are_scores(returned: object, value: float):
    result = to_result(returned, "fn")
    assert result is not None and result == RewardResult(value) and type(result.value) is float


def test_none_says_that_the_reward_does_not_apply():
    assert to_result(None, "fn") is None


def test_a_batch_reward_gives_a_score_for_each_sample():
    expected = [RewardResult(1.0), RewardResult(0.5)]
    for returned in ([1, 0.5], (1.0, 0.5), np.array([1, 0.5]), [np.float32(1), {"score": 0.5}]):
        assert to_results(returned, 2, "fn") == expected
    assert to_results([None, {"score": 1, "acc": 2}], 2, "fn") == [None, RewardResult(1.0, {"acc": 2.0})]
    for wrong, reason in ((1.0, "return a list"), ([1.0], "returned 1 scores for a batch of 2"), ([1.0, "x"], "'x'")):
        with pytest.raises(RewardError, match=reason):
            to_results(wrong, 2, "mine.py:fn")


def test_a_dict_gives_score_and_numeric_extras():
    returned = {"score": 1, "acc": True, "length": np.int64(3), "pred": "42", "parts": [1]}
    assert to_result(returned, "fn") == RewardResult(1.0, {"acc": 1.0, "length": 3.0})


@pytest.mark.parametrize("returned", ["1.0", math.nan, math.inf, [1.0], {"acc": 1.0}, {"score": "1"}, {"score": None}])
def test_what_is_no_number_is_an_error_with_reward_and_value(returned: object):
    with pytest.raises(RewardError) as error:
        to_result(returned, "mine.py:fn")
    shown = (
        "keys ['acc']"
        if returned == {"acc": 1.0}
        else str(returned["score"] if isinstance(returned, dict) else returned)
    )
    assert "reward mine.py:fn returned" in str(error.value) and shown in str(error.value)


def test_results_and_samples_travel_between_processes():
    result = RewardResult(1.0, {"acc": 1.0}, failed="why")
    assert pickle.loads(pickle.dumps(result)) == result
    assert pickle.loads(pickle.dumps(sample())) == sample()
