"""How rewards are composed: what reward.function and reward.by_source say, as a tree. Standard library only.

    math                          one reward
    math | exact_match | 0        the first that answers; a reward answers None where it does not apply
    math + 0.2 * format - 0.1     a weighted sum; None where one of its parts is
    (math | code) + 0.5 * model   brackets group; `|` binds weaker than `+` and `-`, those weaker than `*`

A reward is a name (of the registry, of reward.parts, `model`, `judge`), `package.module:function` or
`path/to/file.py:function`. A path with spaces or with one of + | * ( ) stands in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LARGEST_SCORE = 1e12
"""Largest magnitude of a score, of each number beside it and of each number in a composition. Gradients are squared and
summed over all weights in float32, which ends at 3.4e38: ten billion squares of this still fit."""
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_TOKEN = re.compile(
    rf"""\s*(?:(?P<number>{NUMBER})(?=[\s|*()+-]|$)
    |"(?P<double>[^"]+)" | '(?P<single>[^']+)'
    |(?P<operator>[|*()+] | -(?=[\s(\d.]))
    |(?P<name>[^\s|*()+'"]+))""",
    re.VERBOSE,
)


class Term:
    """A part of a composition; in Python `a | b`, `a + 0.5 * b` and `a - b` build compositions of any two."""

    def __or__(self, other: Term | float) -> First:
        return First((*_members(self, First), *_members(as_term(other), First)))

    def __add__(self, other: Term | float) -> Sum:
        return Sum((*_weighted(self), *_weighted(as_term(other))))

    def __radd__(self, other: float) -> Sum:
        return as_term(other) + self

    def __sub__(self, other: Term | float) -> Sum:
        return self + -1.0 * as_term(other)

    def __mul__(self, weight: float) -> Sum:
        return Sum(tuple((weight * own, term) for own, term in _weighted(self)))

    def __rmul__(self, weight: float) -> Sum:
        return self * weight


@dataclass(frozen=True)
class Reward(Term):
    """One reward by its spec. kwargs: passed with every call; not part of a composition's text."""

    spec: str
    kwargs: dict[str, object] = field(default_factory=dict[str, object])

    @property
    def label(self) -> str:
        """A short name for metrics: what stands after the last colon."""
        return self.spec.rpartition(":")[2]


@dataclass(frozen=True)
class ConstantTerm(Term):
    """The same score for every sample."""

    value: float


@dataclass(frozen=True)
class First(Term):
    """The first of `terms` that answers, for each sample by itself."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Sum(Term):
    """The sum of weight * term."""

    parts: tuple[tuple[float, Term], ...]


def as_term(value: Term | float) -> Term:
    """A number as the reward that always gives it."""
    return value if isinstance(value, Term) else ConstantTerm(float(value))


def _members(term: Term, kind: type[First]) -> tuple[Term, ...]:
    return term.terms if isinstance(term, kind) else (term,)


def _weighted(term: Term) -> tuple[tuple[float, Term], ...]:
    return term.parts if isinstance(term, Sum) else ((1.0, term),)


def rewards_in(term: Term) -> Iterator[Reward]:
    """The rewards that a composition names, from left to right."""
    if isinstance(term, Reward):
        yield term
    elif isinstance(term, First):
        for part in term.terms:
            yield from rewards_in(part)
    elif isinstance(term, Sum):
        for _, part in term.parts:
            yield from rewards_in(part)


def numbers_in(term: Term) -> Iterator[float]:
    """The scores and weights that a composition holds, from left to right."""
    if isinstance(term, ConstantTerm):
        yield term.value
    elif isinstance(term, First):
        for part in term.terms:
            yield from numbers_in(part)
    elif isinstance(term, Sum):
        for weight, part in term.parts:
            yield weight
            yield from numbers_in(part)


def parse_reward(text: str) -> Term:
    """The composition that `text` describes. Raises ValueError saying what is wrong with it."""
    tokens = _tokens(text)
    if not tokens:
        raise ValueError("is empty")
    term, rest = _first(tokens)
    if rest:
        raise ValueError(f"has {rest[0][1]!r} where an operator (| + - *) or the end is expected")
    return term


Token = tuple[str, str]


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"cannot be read from {text[at:].strip()[:20]!r} on (unmatched quotes?)")
        kind = match.lastgroup or ""
        found.append(("name" if kind in ("double", "single") else kind, match.group(kind)))
        at = match.end()
    return found


def _first(tokens: list[Token]) -> tuple[Term, list[Token]]:
    term, tokens = _sum(tokens)
    while tokens and tokens[0] == ("operator", "|"):
        other, tokens = _sum(tokens[1:])
        term = term | other
    return term, tokens


def _sum(tokens: list[Token]) -> tuple[Term, list[Token]]:
    negative = bool(tokens) and tokens[0] == ("operator", "-")
    term, tokens = _product(tokens[1:] if negative else tokens)
    if negative:
        term = ConstantTerm(-term.value) if isinstance(term, ConstantTerm) else -1.0 * term
    while tokens and tokens[0] in (("operator", "+"), ("operator", "-")):
        sign = tokens[0][1]
        other, tokens = _product(tokens[1:])
        term = term + other if sign == "+" else term - other
    return term, tokens


def _product(tokens: list[Token]) -> tuple[Term, list[Token]]:
    term, tokens = _atom(tokens)
    while tokens and tokens[0] == ("operator", "*"):
        other, tokens = _atom(tokens[1:])
        if isinstance(term, ConstantTerm):
            term = ConstantTerm(term.value * other.value) if isinstance(other, ConstantTerm) else term.value * other
        elif isinstance(other, ConstantTerm):
            term = other.value * term
        else:
            raise ValueError("multiplies two rewards: one side of * must be a number")
    return term, tokens


def _atom(tokens: list[Token]) -> tuple[Term, list[Token]]:
    if not tokens:
        raise ValueError("ends where a reward or a number is expected")
    (kind, value), rest = tokens[0], tokens[1:]
    if kind == "number":
        return ConstantTerm(float(value)), rest
    if kind == "name":
        return Reward(value), rest
    if value == "(":
        term, rest = _first(rest)
        if not rest or rest[0] != ("operator", ")"):
            raise ValueError("has an opening bracket without a closing one")
        return term, rest[1:]
    raise ValueError(f"has {value!r} where a reward or a number is expected")
