"""Long lists and values in error messages."""

from __future__ import annotations

import pytest

from megatron_rl.messages import cut, first_lines, first_of, short


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (3, "0; 1; 2"), (4, "0; 1; 2; and 1 more"), (99, "0; 1; 2; and 96 more")]
)
def test_the_first_items_are_shown_and_the_others_are_counted(count: int, text: str) -> None:
    assert first_of((str(number) for number in range(count)), 3, "; ") == text


def test_the_first_lines_are_shown_and_the_others_are_counted() -> None:
    assert first_lines(["a", "b"], 2) == ["  a", "  b"]
    assert first_lines(["a", "b", "c"], 2) == ["  a", "  b", "  ... and 1 more"]


def test_a_long_value_is_cut_to_the_length() -> None:
    assert cut("x" * 60) == "x" * 60 and cut("x" * 61) == "x" * 57 + "..."
    assert short("ab") == "'ab'" and len(short("x" * 100, 80)) == 80


def test_an_int_that_python_does_not_print_has_a_text_too() -> None:
    assert short(10**5000) == "a number of int"
