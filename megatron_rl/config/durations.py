"""Lengths of time as Slurm writes them: 90 (minutes), 90:30, 3:50:00, 1-12, 1-12:30, 1-00:00:00."""

from __future__ import annotations

import re

_FORMS = (
    (re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?"), (86400, 3600, 60, 1)),
    (re.compile(r"(\d+):(\d+):(\d+)"), (3600, 60, 1)),
    (re.compile(r"(\d+)(?::(\d+))?"), (60, 1)),
)


def seconds_of(text: str) -> int | None:
    """Seconds; None where the text is no length of time. A bare number is minutes, as in Slurm.

    Example: seconds_of("3:50:00") == 13800
    """
    for form, units in _FORMS:
        numbers = form.fullmatch(text.strip())
        if numbers:
            return sum(int(number or 0) * unit for number, unit in zip(numbers.groups(), units, strict=True))
    return None
