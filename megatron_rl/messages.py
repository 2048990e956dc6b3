"""How error messages show values and long lists. No torch."""

from __future__ import annotations

from collections.abc import Iterable


def first_of(items: Iterable[str], limit: int, separator: str = ", ") -> str:
    """The first `limit` items as one text, and how many more there are: "a, b, and 3 more"."""
    listed = list(items)
    more = [f"and {len(listed) - limit} more"] if len(listed) > limit else []
    return separator.join([*listed[:limit], *more])


def first_lines(lines: Iterable[str], limit: int) -> list[str]:
    """The first `limit` lines, indented; below them, how many more there are."""
    listed = list(lines)
    more = [f"  ... and {len(listed) - limit} more"] if len(listed) > limit else []
    return [*(f"  {line}" for line in listed[:limit]), *more]


def cut(text: str, length: int = 60) -> str:
    """The text in at most `length` characters; "..." marks what was cut."""
    return text if len(text) <= length else text[: length - 3] + "..."


def short(value: object, length: int = 60) -> str:
    """repr(value) in at most `length` characters."""
    try:
        return cut(repr(value), length)
    except ValueError:  # an int with more digits than Python prints
        return f"a number of {type(value).__name__}"
