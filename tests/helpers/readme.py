"""The commands of a README: what a reader would type, word by word."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

PROGRAMS = ("bash", "megatron-rl", "pip", "python")


def commands_of(text: str) -> list[list[str]]:
    """Words of each command in the indented blocks of a Markdown text, without comments; a backslash at the end of a
    line goes on with the next.

    Raises ValueError for an indented line that starts with no known program: a command that nothing would try.
    """
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    commands = [shlex.split(line, comments=True) for line in joined]
    other = [words[0] for words in commands if words and words[0] not in PROGRAMS]
    if other:
        raise ValueError(f"indented lines that start with {', '.join(other)}, which is none of {', '.join(PROGRAMS)}")
    return [words for words in commands if words]


def filled(words: list[str], places: Mapping[str, str]) -> list[str]:
    """The words with the README's capital letters (MODEL, DIR) replaced by paths."""
    pattern = re.compile(r"(?<![A-Za-z_])(" + "|".join(map(re.escape, places)) + r")(?![A-Za-z_])")
    return [pattern.sub(lambda found: places[found[1]], word) for word in words]
