"""Rewards put together: `a | b`, `a + 0.5 * b`, and one for each data source.

In Python as in a config:

    from megatron_rl.rewards.compose import reward

    term = reward("math") | 0.8 * reward("numeric") + 0.2 * reward(my_function)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_rl.config.checks.reward_terms import ConstantTerm, First, Reward, Sum, Term, rewards_in
from megatron_rl.errors import RewardError
from megatron_rl.rewards.base import Chosen, RewardResult, RewardSample, checked

Results = list[RewardResult | None]
ScoreFn = Callable[[Reward, Sequence[RewardSample]], Results]
"""Scores samples by one reward: a result each, None where the reward does not apply."""


def reward(source: str | Callable[..., object], **kwargs: Any) -> Reward:
    """A reward as a part of compositions: by its spec, or a function or class of a module or of the main script.

    Raises RewardError for a function that another process could not find: a lambda, or one defined in a function.
    """
    if isinstance(source, str):
        return Reward(source, kwargs)
    module, name = getattr(source, "__module__", None), getattr(source, "__qualname__", None)
    if module is None or name is None or not name.isidentifier():
        raise RewardError(
            f"{source!r} cannot be found by name in a process -- define it at the top of a module, by def or class"
        )
    if module == "__main__":
        file = vars(sys.modules["__main__"]).get("__file__")
        if file is None:
            raise RewardError(f"{name} is defined in no file -- put it in a module")
        return Reward(f"{file}:{name}", kwargs)
    return Reward(f"{module}:{name}", kwargs)


def score_by_source(
    default: Term,
    by_source: Mapping[str, Term],
    samples: Sequence[RewardSample],
    score: ScoreFn,
    failed_score: float,
) -> list[RewardResult]:
    """One result a sample, by its data source's composition or by `default`.

    A sample to which nothing applies fails: it has no score. So does one whose sum is not finite or too large.
    `failed_score` is the value of failed samples.
    """
    groups: dict[str | None, list[int]] = {}
    for number, sample in enumerate(samples):
        source = sample.data_source if sample.data_source in by_source else None
        groups.setdefault(source, []).append(number)
    results: Results = [None] * len(samples)
    for source, members in groups.items():
        term = default if source is None else by_source[source]
        found = evaluate(term, Chosen(samples, members), score, failed_score)
        for number, result in zip(members, found, strict=True):
            results[number] = result
    return [
        _nothing_applies(samples[number], failed_score)
        if result is None
        else checked(result, "the reward", failed_score)
        for number, result in enumerate(results)
    ]


def _nothing_applies(sample: RewardSample, failed_score: float) -> RewardResult:
    reason = (
        f"no reward applies to this sample of {sample.data_source!r}: each returned None, which is no score "
        "-- end the composition with one that always answers, for instance `| 0`"
    )
    return RewardResult(failed_score, failed=reason)


def evaluate(term: Term, samples: Sequence[RewardSample], score: ScoreFn, failed_score: float) -> Results:
    """The results of a composition. Where it names several rewards, each one's score is kept as an extra number under
    its label. A part that fails makes the sample fail; the rewards after it in `a | b` are not asked.
    """
    return _Evaluation(term, score, failed_score).of(term, samples)


class _Evaluation:
    def __init__(self, term: Term, score: ScoreFn, failed_score: float) -> None:
        self._score, self._failed_score = score, failed_score
        self._labels: list[tuple[Reward, str]] = []
        for found in rewards_in(term):
            if all(found != known for known, _ in self._labels):
                taken = sum(known.label == found.label for known, _ in self._labels)
                self._labels.append((found, f"{found.label}_{taken + 1}" if taken else found.label))

    def of(self, term: Term, samples: Sequence[RewardSample]) -> Results:
        if not samples:
            return []
        if isinstance(term, ConstantTerm):
            return [RewardResult(term.value)] * len(samples)
        if isinstance(term, First):
            return self._first(term, samples)
        if isinstance(term, Sum):
            return self._sum(term, samples)
        assert isinstance(term, Reward), term
        found = self._score(term, samples)
        results: Results = [one if one is None else checked(one, term.spec, self._failed_score) for one in found]
        if len(self._labels) == 1:
            return results
        label = next(label for known, label in self._labels if known == term)
        return [result if result is None else _labelled(result, label) for result in results]

    def _first(self, term: First, samples: Sequence[RewardSample]) -> Results:
        results: Results = [None] * len(samples)
        left = list(range(len(samples)))
        for part in term.terms:
            found = self.of(part, Chosen(samples, left))
            for number, result in zip(left, found, strict=True):
                results[number] = result
            left = [number for number in left if results[number] is None]
        return results

    def _sum(self, term: Sum, samples: Sequence[RewardSample]) -> Results:
        # A reward model works while reward processes do; rewards of one pool queue behind each other.
        with ThreadPoolExecutor(len(term.parts)) as threads:
            columns = list(threads.map(lambda part: self.of(part[1], samples), term.parts))
        weights = [weight for weight, _ in term.parts]
        return [self._added(weights, answers) for answers in zip(*columns, strict=True)]

    def _added(self, weights: Sequence[float], answers: Sequence[RewardResult | None]) -> RewardResult | None:
        failed = next((answer for answer in answers if answer is not None and answer.failed is not None), None)
        if failed is not None:
            return RewardResult(self._failed_score, failed=failed.failed)
        total, extra = 0.0, {}
        for weight, answer in zip(weights, answers, strict=True):
            if answer is None:
                return None
            total += weight * answer.value
            for name, value in answer.extra.items():
                extra[_free(name, extra)] = value
        return RewardResult(total, extra)


def _labelled(result: RewardResult, label: str) -> RewardResult:
    if result.failed is not None:
        return RewardResult(result.value, failed=f"{label}: {result.failed}")
    extra = {label: result.value}
    for name, value in result.extra.items():
        extra[_free(name, extra)] = value
    return RewardResult(result.value, extra)


def _free(name: str, taken: Mapping[str, float]) -> str:
    number = 2
    while name in taken:
        name, number = f"{name.rstrip('_0123456789')}_{number}", number + 1
    return name
