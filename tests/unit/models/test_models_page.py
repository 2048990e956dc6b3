"""docs/models.md names each family with the kinds of RoPE that it computes, and each of them is in a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.models import FAMILIES
from megatron_rl.models.fields import rope_entries
from tests.helpers.odd_configs import PASSING

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
ROW = re.compile(r"^\| `(\w+)` \|[^|]+\| ([\w, ]+) \|", flags=re.M)


def _kinds_of_the_page() -> dict[str, set[str]]:
    return {name: set(kinds.split(", ")) for name, kinds in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def _kinds_in_tests(model_type: str) -> set[str]:
    """Of the variants that the trainer and vLLM are compared with transformers on."""
    entries = [
        entry
        for family, changes in PASSING
        if family == model_type
        for entry in rope_entries(changes).values()
        if isinstance(entry, dict)
    ]
    return {"default"} | {str(entry.get("rope_type") or entry.get("type") or "default") for entry in entries}


def test_the_page_names_the_families_that_can_be_trained() -> None:
    assert _kinds_of_the_page().keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_names_the_kinds_of_rope_that_a_family_computes(name: str) -> None:
    kinds = {kind.rope_type for kind in FAMILIES[name].fields.ropes}
    assert _kinds_of_the_page().get(name) == kinds
    assert kinds <= _kinds_in_tests(FAMILIES[name].fields.model_type)
