"""Links between the project's texts lead somewhere, and their lines fit a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house import prose
from tests.house.checks import project_files

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [path for path in project_files(ROOT) if path.suffix == ".md"]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def dead_links(text: str, folder: Path) -> list[str]:
    """Links to files that are not there; addresses of other sites are left alone."""
    return [link for link in LINK.findall(text) if "://" not in link and not (folder / link).exists()]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    assert dead_links(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit_a_terminal(path: Path) -> None:
    assert list(prose.wide_lines(path.name, path.read_text(encoding="utf-8"))) == []


def test_a_wide_line_is_seen_and_a_wide_table_is_not() -> None:
    wide = "x" * 121
    assert list(prose.wide_lines("a.md", f"x\n{wide}\n| {wide} |\n")) == ["a.md:2: 121 columns, more than 120"]


def test_a_dead_link_is_seen() -> None:
    text = "[a](README.md) [b](docs/none.md#part) [c](https://example.org/x) [d](gone.py)"
    assert dead_links(text, ROOT) == ["docs/none.md", "gone.py"]
