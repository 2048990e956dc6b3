"""Kinds of RoPE: what is read of config.json, and what the trainer turns queries and keys by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from megatron_rl.mcore.packing import rotary
from megatron_rl.models.fields import rope_entries
from megatron_rl.models.rope import Rope, read_rope


@dataclass(frozen=True)
class Slow(Rope):
    """Frequencies divided by a factor, as rope_type linear has them; cosines and sines twice as large."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    @property
    def amplitude(self) -> float:
        """See Rope."""
        return 2.0

    def scaled(self, frequencies: Sequence[float]) -> list[float]:
        """See Rope."""
        return [one / self.factor for one in frequencies]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (None, Rope()),
        ({}, Rope()),
        ({"rope_theta": 5.0, "factor": None, "partial_rotary_factor": 1}, Rope()),
        ({"rope_type": "linear", "factor": 4}, Slow(4)),
        ({"type": "linear", "factor": 4.0}, Slow(4.0)),
        ({"rope_type": "linear"}, "rope_type linear needs factor: a number above 0"),
        ({"rope_type": "linear", "factor": True}, "needs factor"),
        ({"rope_type": "linear", "factor": 2, "beta": 1}, "beta is no part of rope_type linear"),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, "over a part of the head"),
        ({"rope_type": "default", "type": "linear", "factor": 4}, "type, factor are no part"),
        ({"rope_type": "yarn", "factor": 4}, "only plain RoPE (rope_type default) or rope_type linear"),
        ([], "is not a mapping"),
    ],
)
def test_an_entry_is_one_kind_or_refused(entry: object, expected: Rope | str) -> None:
    kind = read_rope((Rope, Slow), entry)
    if isinstance(expected, Rope):
        assert kind == expected
    else:
        assert isinstance(kind, str) and expected in kind, kind


def test_a_family_without_plain_rope_wants_an_entry() -> None:
    assert read_rope((Slow,), None) == "does not say which of rope_type linear the model has"


def test_the_older_entry_stands_before_the_newer() -> None:
    older, newer = {"rope_type": "linear"}, {"rope_type": "default"}
    assert next(iter(rope_entries({"rope_scaling": older, "rope_parameters": newer}).values())) is older
    assert rope_entries({"rope_scaling": {}, "rope_parameters": newer}) == {"rope_parameters": newer}
    assert rope_entries({"rope_scaling": None}) == {"rope_parameters": None}
    assert rope_entries({"rope_scaling": []}) == {"rope_scaling": []}


def test_queries_and_keys_turn_by_the_scaled_frequencies() -> None:
    positions = torch.arange(0, 40, 4)
    cos, sin = rotary(positions, 8, 1e4, Slow(4.0))
    plain_cos, plain_sin = rotary(positions // 4, 8, 1e4, Rope())
    assert torch.allclose(cos, 2 * plain_cos) and torch.allclose(sin, 2 * plain_sin)
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angles = torch.outer(positions // 4, frequencies)
    assert torch.equal(plain_cos[:, 0], torch.cat([angles, angles], -1).cos())
