from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_rl.config.checks.reward import plan_rewards
from megatron_rl.config.checks.reward_terms import ConstantTerm, First, Reward, Sum, Term, parse_reward
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.rewards.base import Chosen, RewardResult, RewardSample, number_of
from megatron_rl.rewards.compose import Results, evaluate, reward, score_by_source
from megatron_rl.rewards.scorer import RewardScorer

A, B, C = Reward("a"), Reward("b"), Reward("c")


def samples(*texts: str, source: str = "s") -> list[RewardSample]:
    return [RewardSample(source, "", text, "") for text in texts]


class Table:
    """Scores by a table: spec -> text -> result; counts what it is asked."""

    def __init__(self, table: dict[str, dict[str, RewardResult | None]]) -> None:
        self.table, self.asked = table, list[tuple[str, str]]()

    def __call__(self, reward: Reward, batch: Sequence[RewardSample]) -> Results:
        self.asked += [(reward.spec, sample.solution_str) for sample in batch]
        return [self.table[reward.spec].get(sample.solution_str) for sample in batch]


def ok(value: float, **extra: float) -> RewardResult:
    return RewardResult(value, extra)


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("a", A),
        ("a | b | 0", First((A, B, ConstantTerm(0.0)))),
        ("a + 0.5 * b", Sum(((1.0, A), (0.5, B)))),
        ("a - b*2", Sum(((1.0, A), (-2.0, B)))),
        ("-0.5*a", Sum(((-0.5, A),))),
        ("a | b + c", First((A, Sum(((1.0, B), (1.0, C)))))),
        ("2 * (a + b)", Sum(((2.0, A), (2.0, B)))),
        ("0.5 * (a | b) + 1e-1", Sum(((0.5, First((A, B))), (1.0, ConstantTerm(0.1))))),
        ("my-rewards/v1.2/x.py:fn", Reward("my-rewards/v1.2/x.py:fn")),
        (
            "'my rewards/x.py:fn' | package.module:fn",
            First((Reward("my rewards/x.py:fn"), Reward("package.module:fn"))),
        ),
    ],
)
def test_a_composition_is_read_as_python_reads_it(text: str, term: Term):
    assert parse_reward(text) == term


def test_python_builds_the_same_compositions():
    assert parse_reward("a | b | 0") == A | B | 0
    assert Sum(((1.0, A), (0.5, B), (-1.0, ConstantTerm(0.1)))) == A + 0.5 * B - 0.1
    assert parse_reward("2 * (a + b)") == 2 * (A + B) and Sum(((1.0, ConstantTerm(1.0)), (1.0, A))) == 1 + A
    assert reward("math", strict=True) == Reward("math", {"strict": True})
    assert reward(samples).spec == f"{__name__}:samples"
    with pytest.raises(RewardError, match="define it at the top of a module"):
        reward(lambda sample: 1.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("a |", "ends where a reward or a number is expected"),
        ("a * b", "multiplies two rewards"),
        ("(a", "without a closing one"),
        ("a b", "'b' where an operator"),
        ("| a", "'|' where a reward"),
        ("'a", "unmatched quotes"),
    ],
)
def test_a_composition_that_cannot_be_read_says_why(text: str, reason: str):
    with pytest.raises(ValueError) as error:
        parse_reward(text)
    assert reason in str(error.value)


def test_the_first_that_answers_is_taken_and_later_ones_are_asked_about_the_rest_only():
    table = Table({"a": {"x": ok(1.0), "y": None, "z": None}, "b": {"y": ok(0.5, acc=1.0), "z": None}})
    results = evaluate(parse_reward("a | b | -1"), samples("x", "y", "z"), table, 0.0)
    assert results == [ok(1.0, a=1.0), ok(0.5, b=0.5, acc=1.0), ok(-1.0)]
    assert table.asked == [("a", "x"), ("a", "y"), ("a", "z"), ("b", "y"), ("b", "z")]


def test_a_sum_weighs_its_parts_and_keeps_each_score_and_extra_number():
    table = Table({"a": {"x": ok(1.0, acc=1.0)}, "b": {"x": ok(0.5, acc=0.0)}})
    (result,) = evaluate(parse_reward("2 * a - 0.5 * b + 1"), samples("x"), table, 0.0)
    assert result == ok(2.75, a=1.0, acc=1.0, b=0.5, acc_2=0.0)


def test_a_sum_of_which_a_part_does_not_apply_does_not_apply():
    table = Table({"a": {"x": ok(1.0)}, "b": {}, "c": {"x": ok(3.0)}})
    assert evaluate(parse_reward("a + b"), samples("x"), table, 0.0) == [None]
    assert evaluate(parse_reward("a + b | c"), samples("x"), table, 0.0) == [ok(3.0, c=3.0)]
    assert evaluate(parse_reward("a + (b | 0)"), samples("x"), table, 0.0) == [ok(1.0, a=1.0)]


def test_a_part_that_fails_fails_the_sample_by_name_and_nothing_takes_its_place():
    broken = RewardResult(-1.0, failed="ValueError: no")
    table = Table({"a": {"x": broken}, "b": {"x": ok(1.0)}})
    for text in ("a | b", "b + 0.5 * a"):
        (result,) = evaluate(parse_reward(text), samples("x"), table, -1.0)
        assert result == RewardResult(-1.0, failed="a: ValueError: no")


def test_parts_of_a_sum_are_scored_at_the_same_time():
    both = threading.Barrier(2, timeout=60)

    def score(reward: Reward, batch: Sequence[RewardSample]) -> Results:
        both.wait()
        return [ok(1.0)] * len(batch)

    assert evaluate(A + B, samples("x"), score, 0.0) == [ok(2.0, a=1.0, b=1.0)]


def test_each_data_source_has_its_own_reward_and_results_keep_their_order():
    table = Table({"a": {t: ok(1.0) for t in "xyz"}, "b": {"y": ok(2.0)}})
    batch = [*samples("x"), *samples("y", source="other"), *samples("z")]
    assert score_by_source(A, {"other": B}, batch, table, 0.0) == [ok(1.0), ok(2.0), ok(1.0)]
    assert sorted(table.asked) == [("a", "x"), ("a", "z"), ("b", "y")]


def test_a_sample_without_any_score_fails_and_says_so():
    """R6"""
    (result,) = score_by_source(A, {}, samples("x"), Table({"a": {}}), -2.0)
    assert (
        result.value == -2.0
        and result.failed is not None
        and "no reward applies to this sample of 's'" in result.failed
    )


# From the config


def plan(**fields: Any):
    return plan_rewards(RewardConfig(**fields))


def test_parts_and_kwargs_find_their_reward():
    parts = {"fmt": {"function": "regex", "kwargs": {"pattern": "x"}}}
    found, faults = plan(function="math + 0.5 * fmt", parts=parts, by_source={"s": "fmt | numeric"})
    fmt = Reward("regex", {"pattern": "x"})
    assert not faults and found is not None
    assert found.default == Reward("math") + 0.5 * fmt and found.by_source == {"s": fmt | Reward("numeric")}
    assert found.rewards() == [Reward("math"), fmt, Reward("numeric")]
    found, faults = plan(function="regex + 0.1 * model", kwargs={"pattern": "y"})
    assert found is not None and found.default == Reward("regex", {"pattern": "y"}) + 0.1 * Reward("model")
    assert found.uses("model") and not found.uses("judge")


@pytest.mark.parametrize(
    ("fields", "key", "reason"),
    [
        ({"function": "a *"}, "reward.function", "ends where"),
        ({"by_source": {"s": "math math"}}, "reward.by_source.s", "where an operator"),
        ({"function": "math | numeric", "kwargs": {"x": 1}}, "reward.kwargs", "which of 2 rewards"),
        ({"parts": {"math": {"function": "regex"}}}, "reward.parts.math", "is no free name"),
        ({"parts": {"mine": "regex"}}, "reward.parts.mine", "is not a mapping"),
        ({"parts": {"mine": {"function": "regex", "pattern": "x"}}}, "reward.parts.mine.pattern", "no such key"),
        ({"parts": {"mine": {"kwargs": {}}}}, "reward.parts.mine", "has no function"),
    ],
)
def test_a_section_that_cannot_be_read_is_a_fault(fields: dict[str, Any], key: str, reason: str):
    """R5"""
    found, faults = plan(**fields)
    assert found is None and [fault.key for fault in faults] == [key] and reason in faults[0].reason


# The run's scorer


def test_rules_and_models_are_composed_over_processes():
    def model(batch: Sequence[RewardSample]) -> Results:
        return [RewardResult(float(len(sample.solution_str)), {"long": 1.0}) for sample in batch]

    cfg = RewardConfig(
        function="model + 0.5 * numeric",
        by_source={"words": "has_x | 0.25"},
        parts={"has_x": {"function": "regex", "kwargs": {"pattern": "x"}}},
    )
    batch = [
        RewardSample("add2", "", "9", "9"),
        RewardSample("words", "", "x", ""),
        RewardSample("add2", "", "18", "9"),
    ]
    with RewardScorer(cfg, {"model": model}) as scorer:
        scorer.preflight(batch)
        results = scorer.score(batch)
    assert [result.value for result in results] == [1.5, 1.0, 2.0]
    assert results[0].extra == {"model": 1.0, "long": 1.0, "numeric": 1.0} and results[1].extra == {}
    with pytest.raises(RewardError, match="names model, which nothing gives"):
        RewardScorer(cfg)
    with pytest.raises(ConfigError, match=r"reward\.function"):
        RewardScorer(RewardConfig(function="a *"))


def test_too_many_failures_stop_the_run_and_a_preflight_names_the_source():
    cfg = RewardConfig(function="exact_match", by_source={"broken": "numeric"}, max_failed_share=0.5)
    good, bad = RewardSample("add2", "", "9", "9"), RewardSample("broken", "", "9", "nine")
    with RewardScorer(cfg) as scorer:
        results = scorer.score([good, bad])
        scorer.require_few_failures(results)
        with pytest.raises(RewardError, match=r"failed on 1 of 1 samples, more than reward.max_failed_share 0.5"):
            scorer.require_few_failures(results[1:])
        with pytest.raises(RewardError, match=r"reward.by_source.broken: 'numeric' fails on a first sample"):
            scorer.preflight([good, bad])


def test_chosen_samples_are_read_one_by_one_and_know_their_number_among_all():
    read: list[int] = []

    class Elsewhere(Sequence[RewardSample]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number):  # type: ignore[override]
            read.append(number)
            return RewardSample("s", "", str(number), "")

    chosen = Chosen(Chosen(Elsewhere(), [5, 3, 1, 0]), [0, 2, 3])
    assert len(chosen) == 3 and read == []
    assert chosen[1].solution_str == "1" and [one.solution_str for one in chosen[::2]] == ["5", "0"]
    assert read == [1, 5, 0]
    assert [number_of(chosen, place) for place in range(3)] == [5, 1, 0] and number_of([chosen[0]], 0) == 0
