"""House rules on docstrings and Markdown: how their lines break. From a file's name and text to complaints."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MAX_TEXT_COLUMNS = 120
# A line this long broke because it was full; a shorter one broke where its writer wanted.
FULL_LINE_COLUMNS = 90
FEWEST_WORDS, FEWEST_WORDS_WITHIN = 3, 5

_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def wide_lines(name: str, text: str) -> Iterator[str]:
    """Lines of a Markdown text that no terminal of 120 columns shows whole. Rows of tables cannot break and may be."""
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_TEXT_COLUMNS and not line.startswith("|"):
            yield f"{name}:{number}: {len(line)} columns, more than {MAX_TEXT_COLUMNS}"


def broken_wraps(name: str, text: str) -> Iterator[str]:
    """Short lines that follow a full one in a docstring: what an automatic reflow leaves behind. One or two words at
    the end of a paragraph, up to four within it. Examples, which are indented, may have short lines.
    """
    for first, lines in docstrings(name, text):
        for number in range(1, len(lines)):
            words = lines[number].strip().removesuffix('"""').split()
            within = number + 1 < len(lines) and _goes_on(lines[number], lines[number + 1])
            fewest = FEWEST_WORDS_WITHIN if within else FEWEST_WORDS
            if 0 < len(words) < fewest and _follows_full_line(lines, number):
                yield f"{name}:{first + number}: {' '.join(words)!r} is left alone on a line; wrap the paragraph again"


def docstrings(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, source lines) of each docstring, those below fields and constants included."""
    lines = text.splitlines()
    for holder in ast.walk(ast.parse(text, name)):
        for statement in holder.body if isinstance(holder, _HOLDERS) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, lines[statement.lineno - 1 : statement.end_lineno]


def _follows_full_line(lines: list[str], number: int) -> bool:
    """Whether a line goes on with the text of a full line above it, and is as far in as the docstring."""
    above = lines[number - 1]
    in_example = _indent(lines[number]) > _indent(lines[0])
    return len(above) >= FULL_LINE_COLUMNS and _goes_on(above, lines[number]) and not in_example


def _goes_on(line: str, below: str) -> bool:
    """Whether the next line belongs to the same paragraph: as far in, and not the closing quotes or a list's item."""
    text = below.strip()
    return bool(text) and text != '"""' and not text.startswith("- ") and _indent(line) == _indent(below)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
