r"""verl's rules by data source. The verdicts in the tables were worked out by hand from verl's scorers
(verl/utils/reward_score), whose rules are quoted beside them in words.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_rl.rewards.base import RewardSample, to_result
from megatron_rl.rewards.load import load_reward
from megatron_rl.rewards.verl import RULES, SOURCES, rule_of
from megatron_rl.rewards.verl.programs import read_tests, same_output, same_value
from megatron_rl.rewards.verl.texts import plain_answer, plain_latex

SCORE = load_reward("data_source")
LONG = "so we go on. " * 30


def value(source: str, solution: str, truth: Any, **kwargs: Any) -> float:
    scorer = load_reward("data_source", kwargs) if kwargs else SCORE
    result = to_result(scorer(RewardSample(source, "", solution, truth)), "data_source")
    assert result is not None
    return result.value


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        *((name, "dapo") for name in ("math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime_2025")),
        *((f"numina_{name}", "prime_math") for name in ("aops_forum", "cn_k12", "olympiads", "synthetic_math")),
        *((name, "code") for name in ("codecontests", "apps", "codeforces", "taco")),
        ("hiyouga/geometry3k", "geo3k"),
        *((f"searchR1_{name}", "search") for name in ("nq", "triviaqa", "popqa", "hotpotqa", "musique", "bamboogle")),
        *(
            (name, None)
            for name in ("gsm8k", "numina_other", "searchR1_other", "AIME", "MATH", "", "add2", "math_dapo2")
        ),
    ],
)
def test_each_source_has_verls_rule_and_no_other_has_one(source: str, rule: str | None):
    assert rule_of(source) == rule and (rule is None or rule in RULES) and set(SOURCES.values()) <= set(RULES)


# GSM8K: the last "#### number" among the last 300 characters, commas aside, is the truth's text.


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1),
        ("7", "7", 0),
        ("the answer is 7.", "7", 0),
        ("#### 7 then #### 8", "8", 1),
        ("#### 8 then #### 7", "8", 0),
        ("#### 1,234", "1234", 1),
        ("#### -5", "-5", 1),
        ("#### $7", "7", 0),
        ("####7", "7", 0),
        ("####  7", "7", 0),
        ("#### 7.", "7", 0),
        ("#### 7.0", "7", 0),
        ("#### 7 apples", "7", 1),
        ("#### 7" + LONG, "7", 0),
        (LONG + "#### 7", "7", 1),
        ("#### 7", 7, 1),
        ("", "7", 0),
    ],
)
def test_gsm8k_asks_for_the_marked_number(solution: str, truth: Any, score: float):
    assert value("openai/gsm8k", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "score"), [("it is 7", 1), ("7 .", 1), ("#### 8, or 7", 1), ("none", 0), ("7 8", 0)]
)
def test_gsm8k_may_take_the_last_number(solution: str, score: float):
    assert value("openai/gsm8k", solution, "7", method="flexible") == score


# MATH: the content of the last \boxed, written plainly.


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac12}", r"\dfrac{1}{2}", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{.5}", "0.5", 1),
        (r"\boxed{2/4}", r"\frac{1}{2}", 0),
        (r"\boxed{x = 5}", "5", 1),
        (r"\boxed{abc = 5}", "5", 0),
        (r"\boxed{\sqrt3}", r"\sqrt{3}", 1),
        (r"\boxed{12\text{ cm}}", "12", 1),
        (r"\boxed{12\text{cm}}", "12", 0),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{\$12}", "12", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1),
        (r"\boxed{1}\boxed{2}", "2", 1),
        (r"\boxed{2}\boxed{1}", "2", 0),
        (r"\boxed 7$ done", "7", 1),
        (r"\fbox{7}", "7", 0),
        (r"\boxed{7", "7", 0),
        ("7", "7", 0),
        ("the answer is 7", "7", 0),
        (r"\boxed{1,000}", "1000", 0),
        (r"\boxed{10,\!000}", "10,000", 1),
        (r"\boxed{\frac{1}{\text{ a}\text{ b}}}", r"\frac{1}{\text{ a}\text{ b}}", 1),
    ],
)
def test_math_compares_boxed_answers_written_plainly(solution: str, truth: str, score: float):
    for source in ("lighteval/MATH", "HuggingFaceH4/MATH-500"):
        assert value(source, solution, truth) == score


@pytest.mark.parametrize("text", [r"2\frac", r"\sqrt", r"1\text{ a}\text{ b}"])
def test_an_answer_cut_short_is_compared_as_it_stands(text: str):
    with pytest.raises(ValueError):
        plain_latex(text)
    assert value("lighteval/MATH", rf"\boxed{{{text}}}", text) == 1


# DAPO: what follows the last "Answer:" on its line among the last 300 characters; 1 or -1.


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("Answer: 34", "34", 1),
        ("answer : 34", "34", 1),
        ("ANSWER:\n34", "34", 1),
        ("Answer: $34$", "34", 1),
        ("Answer: $x = 34$", "34", 1),
        (r"Answer: \boxed{34}", "34", 1),
        (r"Answer: $\boxed{34}$", "34", 1),
        ("Answer: 34 dollars", "34", 1),
        ("Answer: 34.", "34", -1),
        ("Answer: 1,000", "1000", 1),
        (r"Answer: 90^\circ", "90", 1),
        (r"Answer: \frac12", r"\frac{1}{2}", 1),
        (r"Answer: 34\text{ m}", "34", 1),
        (r"Answer: 34\text{ kg}", "34", -1),
        ("Answer: 33\nAnswer: 34", "34", 1),
        ("Answer: 34\nAnswer: 33", "34", -1),
        (r"\boxed{34}", "34", -1),
        ("34", "34", -1),
        ("", "34", -1),
        ("Answer: 34" + LONG, "34", -1),
        ("Answer: 34\n" + LONG, "34", -1),
        ("Answer: 34", 34, 1),
    ],
)
def test_dapo_gives_one_or_minus_one(solution: str, truth: Any, score: float):
    for source in ("math_dapo", "aime2024"):
        assert value(source, solution, truth) == score
    result = to_result(SCORE(RewardSample("math_dapo", "", solution, truth)), "x")
    assert result is not None and result.extra == {"acc": float(score > 0)}


def test_dapos_words_and_layout_go():
    assert plain_answer(r"the price = $12 \text{m}$") == "12" and plain_answer("1,2,3") == "123"


# search-R1: the last <answer> is one of the targets, letter case, punctuation and articles aside.


@pytest.mark.parametrize(
    ("solution", "target", "score"),
    [
        ("<answer>Beatles</answer>", "The Beatles", 1),
        ("<answer> the  BEATLES! </answer>", ["x", "beatles"], 1),
        ("<answer>Beatles</answer><answer>Stones</answer>", "Stones", 1),
        ("<answer>Stones</answer><answer>Beatles</answer>", "Stones", 0),
        ("Beatles", "Beatles", 0),
        ("<answer>the Beatles band</answer>", "Beatles", 0),
        ("<answer>U.S.</answer>", "US", 1),
        ("</answer>" * 11 + "<answer>a b</answer>", "b", 0.25),
        ("<answer>b</answer>" * 10, "b", 1),
        ("<answer>b</answer>" * 11, "b", 0.25),
    ],
)
def test_search_compares_tagged_answers(solution: str, target: Any, score: float):
    assert value("searchR1_nq", solution, {"target": target}) == score


# prime_math and geo3k


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "1/2", 1),
        (r"so the answer is $7$.", "7", 1),
        ("I get 7", "7", 1),
        ("7 is the answer", "7", 1),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        (r"\boxed{x+1}", "1+x", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{[1, 2)}", "(1,2)", 0),
        (r"\boxed{2/4}", "1/2", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{0.5}", "50", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{12 \text{ cm}}", "12", 1),
        (r"\boxed{3.14}", r"\pi", 1),
        (r"\boxed{2\pi}", "6.28", 1),
        (r"\boxed{5}", "6", 0),
        (r"\boxed{x+2}", "1+x", 0),
        ("", "6", 0),
        ("no idea", "6", 0),
        ("\\boxed{__import__('os').getpid()}", "6", 0),
    ],
)
def test_prime_math_compares_expressions(solution: str, truth: str, score: float):
    assert value("numina_olympiads", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"<think>a</think> \boxed{12}", "12", 1.0),
        (r"\boxed{12}", "12", 0.9),
        (r"<think>a</think> \boxed{13}", "12", 0.1),
        (r"<think>a</think> 12", "12", 0.0),
        (r"\boxed{2 \sqrt { 3 }}", r"2\sqrt{3}", 0.9),
        (r"\boxed{12^\circ}", "12", 0.9),
        (r"\boxed{2/4}", "1/2", 0.0),
        (r"\boxed{12} and \boxed{12", "12", 0.0),
        ("12", "12", 0.0),
    ],
)
def test_geo3k_adds_its_form(solution: str, truth: str, score: float):
    assert value("hiyouga/geometry3k", solution, truth) == pytest.approx(score)


# Programs


def fenced(code: str) -> str:
    return f"Here:\n```python\n{code}\n```\nDone."


ADD = {"inputs": ["1 2", "3 4"], "outputs": ["3\n", "7"]}
READ = "a, b = map(int, input().split())\n"


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (fenced(READ + "print(a + b)"), ADD, 1.0),
        (fenced(READ + "print(a + b)"), json.dumps(ADD), 1.0),
        (READ + "print(a + b)", ADD, 1.0),
        (fenced(READ + "print(3)"), ADD, 0.5),
        (fenced(READ + "print(a - b)"), ADD, 0.0),
        (fenced("print(1)\n```\nor\n```python\n" + READ + "print(a + b)"), ADD, 1.0),
        (fenced("this is no code"), ADD, 0.0),
        (fenced("print(sqrt(4.0), Counter([1]).most_common(1)[0][0])"), {"inputs": [""], "outputs": ["2.0 1"]}, 1.0),
        (fenced("def f(a, b):\n    return a + b"), {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}, 1.0),
        (fenced("def f(a, b):\n    return a + b"), {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "f"}, 1.0),
        (
            fenced("class Solution:\n    def f(self, a):\n        return (a, a)"),
            {"inputs": [[1]], "outputs": [[1, 1]], "fn_name": "f"},
            1.0,
        ),
        (fenced("def f(a):\n    return a"), {"inputs": [[1], [2]], "outputs": [1, [2]], "fn_name": "f"}, 1.0),
        (fenced("def f(d):\n    return d[1]"), {"inputs": [[{"1": 5}]], "outputs": [5], "fn_name": "f"}, 1.0),
        (fenced("def g(a):\n    return a"), {"inputs": [[1]], "outputs": [1], "fn_name": "f"}, 0.0),
    ],
)
def test_programs_are_scored_by_the_share_of_tests(solution: str, truth: Any, score: float):
    assert value("taco", solution, truth) == score


@pytest.mark.parametrize(
    ("output", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        (" 1 \n2", "1\n2", True),
        ("1\n\n2", "1\n2", True),
        ("1\n2", "1\n\n2\n", True),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.3333", False),
        ("10000000", "10000001", False),
        ("1 2", "1\n2", False),
        ("", "", True),
        ("", "1", False),
        ("a", "b", False),
    ],
)
def test_outputs_are_compared_as_lines_or_near_numbers(output: str, wanted: str, same: bool):
    assert same_output(output, wanted) is same


def test_values_are_compared_alone_or_as_the_first_of_a_list():
    assert same_value(3, [3, 4]) and same_value([3], [3]) and not same_value(4, [3, 4]) and not same_value(3, [])


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        ("no json", "no JSON"),
        ("[1]", "is a list"),
        ({}, "no lists of one length"),
        ({"inputs": [], "outputs": []}, "with a test in them"),
        ({"inputs": ["1"], "outputs": []}, "no lists of one length"),
        ({"inputs": "1", "outputs": "1"}, "no lists of one length"),
        ({"inputs": [1], "outputs": [1], "fn_name": 3}, "fn_name is 3"),
    ],
)
def test_tests_that_are_none_are_refused(truth: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        read_tests(truth)


def test_a_row_that_declares_no_source_has_no_rule_and_an_unknown_source_lists_choices():
    assert SCORE(RewardSample("aime2024", "", "Answer: 3", "3", has_source=False)) is None
    with pytest.raises(
        ValueError, match=r"verl has no rule for the data source 'add2' -- name a reward .*openai/gsm8k"
    ):
        SCORE(RewardSample("add2", "", "3", "3"))
