"""House rules on the text of the project's files. Each rule is first shown to catch what it forbids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house import checks, prose

ROOT = Path(__file__).resolve().parents[2]

Check = Callable[[str, str], Iterator[str]]


def complaints(check: Check, belongs: Callable[[Path], bool]) -> list[str]:
    found: list[str] = []
    for path in checks.project_files(ROOT):
        if belongs(path):
            found += check(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    return found


def is_python(path: Path) -> bool:
    return path.suffix == ".py"


def report(found: list[str]) -> str:
    return "\n".join(["", *found])


def test_the_listing_sees_the_package_and_not_what_git_ignores():
    names = {str(path.relative_to(ROOT)) for path in checks.project_files(ROOT)}
    assert {"setup.py", "launch/install.sh", ".ci/run", "megatron_rl/errors.py"} <= names
    assert not [name for name in names if name.startswith((".venv/", "runs/")) or "__pycache__" in name]


def test_every_folder_of_the_package_is_a_package():
    # setup.py installs the folders that have one; without it, an installed copy lacks the module.
    folders = {path.parent for path in (ROOT / "megatron_rl").rglob("*.py")}
    assert not [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]


def test_no_file_is_long():
    found = complaints(checks.long_file, checks.is_code)
    assert not found, report(found)


def test_no_function_is_long():
    found = complaints(checks.long_functions, is_python)
    assert not found, report(found)


def test_text_is_ascii():
    found = complaints(checks.non_ascii, checks.is_text)
    assert not found, report(found)


def test_no_broad_except_goes_on():
    found = complaints(checks.broad_excepts, is_python)
    assert not found, report(found)


def test_no_machine_paths_or_registry_hosts():
    found = complaints(checks.machine_paths, checks.is_text)
    assert not found, report(found)


def test_no_docstring_was_broken_by_a_reflow():
    found = complaints(prose.broken_wraps, is_python)
    assert not found, report(found)


def test_the_size_rules_catch_one_line_too_many():
    body = "    x = 1\n"
    assert not list(checks.long_file("a.py", "x\n" * 600))
    assert list(checks.long_file("a.py", "x\n" * 601)) == ["a.py: 601 lines, more than 600"]
    assert not list(checks.long_functions("a.py", "def f():\n" + body * 79))
    assert len(list(checks.long_functions("a.py", "def f():\n" + body * 80))) == 1
    assert len(list(checks.long_functions("a.py", "@staticmethod\ndef f():\n" + body * 79))) == 1
    nested = "class A:\n    async def f(self):\n" + "        x = 1\n" * 80
    assert list(checks.long_functions("a.py", nested)) == ["a.py:2: f has 81 lines, more than 80"]


FULL = "word " * 20


def test_the_wrap_rule_catches_words_that_a_reflow_left():
    at_the_end = f'"""{FULL}\nonce.\n"""\n'
    assert list(prose.broken_wraps("a.py", at_the_end)) == [
        "a.py:2: 'once.' is left alone on a line; wrap the paragraph again"
    ]
    within = f'class A:\n    """{FULL}\n    before t in\n    its sequence.\n    """\n'
    assert len(list(prose.broken_wraps("a.py", within))) == 1
    of_a_field = f'class A:\n    x: int\n    """{FULL}\n    or so."""\n'
    assert len(list(prose.broken_wraps("a.py", of_a_field))) == 1


def test_the_wrap_rule_allows_short_lines_that_their_writer_wanted():
    good = [
        f'"""{FULL}\nat least three.\n"""\n',
        '"""One line.\nAnother.\n"""\n',
        f'"""{FULL}\n\nExample.\n"""\n',
        f'"""{FULL}\n- item\n"""\n',
        f'"""{FULL}\n\n    {FULL}\n    x = f(y)\n"""\n',
        f'x = """{FULL}\nonce."""\n',
    ]
    for text in good:
        assert not list(prose.broken_wraps("a.py", text)), text


def test_the_ascii_rule_names_line_and_character():
    assert list(checks.non_ascii("a.md", "plain\nna" + chr(0xEF) + "ve\n")) == ["a.md:2: not ASCII: U+00EF"]


@pytest.mark.parametrize(
    "handler",
    [
        "except:\n    pass",
        "except Exception:\n    x = None",
        "except BaseException as error:\n    print(error)",
        "except (ValueError, Exception):\n    pass",
        "except builtins.Exception:\n    pass",
        "except Exception:\n    if x:\n        raise",
        "except Exception:\n    if x:\n        return_ = 1\n    else:\n        raise",
        "except Exception:\n    def inner():\n        raise\n    inner()",
        "except Exception as error:\n    print(error)\n    return None",
        "except Exception as error:\n    reason = str(error)\n    return 0.0",
    ],
)
def test_the_except_rule_catches(handler: str):
    assert len(list(checks.broad_excepts("a.py", f"try:\n    f()\n{handler}\n"))) == 1


def test_the_except_rule_catches_an_early_way_out_and_suppress():
    early = "while x:\n  try:\n    f()\n  except Exception:\n    if y:\n      continue\n    raise\n"
    assert len(list(checks.broad_excepts("a.py", early))) == 1
    assert len(list(checks.broad_excepts("a.py", "with contextlib.suppress(Exception):\n    f()\n"))) == 1


@pytest.mark.parametrize(
    "handler",
    [
        "except ValueError:\n    pass",
        "except (OSError, KeyError) as error:\n    print(error)",
        "except BaseException:\n    close()\n    raise",
        "except Exception as error:\n    raise RuntimeError('worker 3') from error",
        "except Exception as error:\n    reason = str(error)\n    return Failed(reason=reason[:80])",
    ],
)
def test_the_except_rule_allows(handler: str):
    assert not list(checks.broad_excepts("a.py", f"try:\n    f()\n{handler}\n"))


def test_the_machine_rule_catches_paths_and_hosts():
    # Written in two halves, so that this file itself keeps the rule.
    paths = ["root/.cache", "work", "home/ann/model", "opt/wheels"]
    bad = [f"cd /{path}" for path in paths] + ["https://pypi" + ".org/simple"]
    for line in bad:
        assert len(list(checks.machine_paths("a.sh", line))) == 1, line
    good = ["network/", "at work/home", "/tmp/x", "reset/root_mean_square", "a/work/b", "/workspace"]
    for line in [*good, "https://download.pytorch.org/whl/cpu"]:
        assert not list(checks.machine_paths("a.sh", line)), line
