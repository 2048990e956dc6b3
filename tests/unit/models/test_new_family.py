"""docs/add-a-model.md, done in a copy of the tree: a dense family with another kind of RoPE is one file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("megatron_rl", "tests/helpers")


def listing(root: Path) -> dict[str, bytes]:
    """Path below root -> content of every Python file."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}


def files_of_the_page() -> dict[str, str]:
    """Path -> content of the files that the page writes down."""
    page = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^`(\S+\.py)`:\n\n```python\n(.*?)^```$", page, flags=re.S | re.M))


def test_a_family_with_another_kind_of_rope_is_one_file_and_its_test(tmp_path: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "ranks").mkdir()
    before = listing(tmp_path)
    for name, content in files_of_the_page().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    after = listing(tmp_path)
    touched = {name for name in after if after[name] != before.get(name)}
    assert touched == {"megatron_rl/models/families/llama_long.py", "tests/ranks/test_llama_long.py"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ranks/test_llama_long.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
