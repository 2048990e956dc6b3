"""One reading of the final number, for the reward `numeric`, for votes and for validation."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from megatron_rl.rewards.answers import extract_answer, final_number, only_number, vote
from megatron_rl.rewards.base import RewardResult
from megatron_rl.rewards.text import numeric
from megatron_rl.runs.validation import validation_metrics
from megatron_rl.types import Prompt, Rollout, RolloutGroup
from tests.helpers.rollouts import rollouts_of

TABLE = [
    ("5-3", "3"),
    ("5 - 3", "3"),
    ("10\u22123", "3"),
    ("(2)-(5)", "5"),
    ("x=-3", "-3"),
    ("x = - 3", "-3"),
    ("the answer is \u22123", "-3"),
    ("-3", "-3"),
    (r"\boxed{-3}", "-3"),
    ("(-3)", "-3"),
    ("pages 2-3", "3"),
    ("1,234", "1234"),
    ("12,345,678.9 in all", "12345678.9"),
    ("3,4", "4"),
    (r"1{,}234", "1234"),
    (r"1\,234", "1234"),
    (r"1,\!234", "1234"),
    ("1_000", "1000"),
    ("$1,234.50.", "1234.5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    (r"it costs \$12", "12"),
    ("5\u20ac", "5"),
    ("50%", "50"),
    (r"50\%", "50"),
    ("12 cm", "12"),
    ("12cm", "12"),
    ("12 cm2", "12"),
    ("12 cm^2", "12"),
    (r"12 \text{ m}^{2}", "12"),
    ("x_1 = 4 and so is x_2", "4"),
    ("4 of H2O", "4"),
    ("1/2", "1/2"),
    ("1 / 4", "1/4"),
    (r"\frac{1}{2}", "1/2"),
    (r"x = -\dfrac{3}{4}", "-3/4"),
    (r"\frac12", "1/2"),
    ("7 3/4 cups", "31/4"),
    ("10/2 = 5", "5"),
    ("on 3/4/2024", "2024"),
    ("1e3", "1000"),
    ("2.5E-2", "1/40"),
    (r"1.5 \times 10^{6}", "1500000"),
    ("3 x 10^2", "300"),
    ("10^6", "1000000"),
    ("42.", "42"),
    ("42...", "42"),
    ("3.14.", "157/50"),
    (".5", "1/2"),
    ("-.5", "-1/2"),
    ("3rd", "3"),
]


@pytest.mark.parametrize(("text", "number"), TABLE)
def test_the_final_number_is_one_for_the_reward_and_for_votes(text: str, number: str):
    value = Fraction(number)
    assert final_number(text) == value
    assert numeric("s", text, str(value), {}) == 1.0 and numeric("s", text, str(value + 1), {}) == 0.0
    if "boxed" not in text:
        assert only_number(extract_answer(text)) == value


@pytest.mark.parametrize("text", ["", "none", "x^2", "a - b", "1e999999999", "9" * 5000, "1/0", "...", "%", "H2O"])
def test_a_text_without_a_number_has_none(text: str):
    assert final_number(text) is None and numeric("s", text, "0", {}) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(
            ("1,234", "1234"),
            ("$5.00", "5"),
            ("50%", "50"),
            (" 7 ", "7"),
            ("+3", "3"),
            ("1/2", "1/2"),
            ("-1e2", "-100"),
        ),
        *((text, None) for text in ("5 apples", "3 4", "12 5/3", "x=3", "", "1,23", "5-3", "nan", "inf", "9" * 500)),
    ],
)
def test_a_text_that_is_a_number_and_no_more(text: str, number: str | None):
    assert only_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize("text", ["1" * 20_000, "1,1" * 9_000, "-" * 20_000, "1/" * 9_000, "= " * 9_000, "1 " * 9_000])
def test_a_long_text_is_read_in_a_moment(text: str):
    start = time.process_time()
    final_number(text)
    assert time.process_time() - start < 2.0


def test_answers_that_are_one_number_vote_together():
    assert [vote(answer) for answer in ("1,234.0", "$1234", r"\frac{1}{2}", "0.50", "B")] == [
        *("1234", "1234", "1/2", "1/2", "B")
    ]
    texts = ["it is 1,000", "#### 1000.0", r"\boxed{1e3}", "7", "7"]
    rollouts = tuple(Rollout((1,), (0.0,), "stop", text) for text in texts)
    group = RolloutGroup(Prompt(0, (1,), "p", "s", "1000"), rollouts, 0)
    results = [RewardResult(numeric("s", text, "1000", {})) for text in texts]
    assert validation_metrics(rollouts_of([group]), results)["val/maj@5"] == 1.0
