"""Links between the project's texts lead somewhere, and their lines fit a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house import prose
from tests.house.checks import project_files

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [path for path in project_files(ROOT) if path.suffix == ".md"]
NAMED = re.compile(
    r"`((?:benchmarks|configs|docs|examples|launch|megatron_rl|requirements|tests)/[\w./*-]*)(?:::(\w+))?`"
)
IN_PACKAGE = re.compile(r"`([a-z]+/[\w/]+\.py)`")
PLACES = (".", "megatron_rl", "megatron_rl/models")
MADE_BY_EXAMPLES = {
    "docs/add-a-model.md": ["megatron_rl/models/families/llama_long.py", "tests/ranks/test_llama_long.py"],
}
"""Files that a text's worked example makes; a test applies it."""
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


def missing_names(text: str, root: Path) -> list[str]:
    """Files and functions in backticks that are not there: by their path, or by their path in the package."""
    missing = [f"{path}" for path, _ in NAMED.findall(text) if not list(root.glob(path.rstrip("/")))]
    missing += [path for path in IN_PACKAGE.findall(text) if not any((root / at / path).exists() for at in PLACES)]
    for path, function in NAMED.findall(text):
        if function and path not in missing and f"def {function}(" not in (root / path).read_text(encoding="utf-8"):
            missing.append(f"{path}::{function}")
    return list(dict.fromkeys(missing))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_that_a_text_names_are_there(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert missing_names(path.read_text(encoding="utf-8"), ROOT) == MADE_BY_EXAMPLES.get(name, [])


def test_a_name_of_nothing_is_seen() -> None:
    here = "tests/house/test_docs.py"
    text = f"`docs/none.md` `docs/*.md` `{here}::dead_links` `{here}::none` `runs/no.py` `runs/loop.py`"
    assert missing_names(text, ROOT) == ["docs/none.md", "runs/no.py", "tests/house/test_docs.py::none"]


def test_a_wide_line_is_seen_and_a_wide_table_is_not() -> None:
    wide = "x" * 121
    assert list(prose.wide_lines("a.md", f"x\n{wide}\n| {wide} |\n")) == ["a.md:2: 121 columns, more than 120"]


def test_a_dead_link_is_seen() -> None:
    text = "[a](README.md) [b](docs/none.md#part) [c](https://example.org/x) [d](gone.py)"
    assert dead_links(text, ROOT) == ["docs/none.md", "gone.py"]
