"""ruff, pyright and import-linter are clean, and each is shown to catch what it is there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "megatron", "vllm", "transformers")

LAYERED_SAMPLE = {
    "sample/__init__.py": "",
    "sample/top.py": "",
    "sample/low.py": "import sample.top\n",
    "sample/stray.py": "",
    "pyproject.toml": """
[tool.importlinter]
root_package = "sample"
[[tool.importlinter.contracts]]
name = "Layers"
type = "layers"
containers = ["sample"]
exhaustive = true
layers = ["top", "low"]
""",
}


def run(command: list[str], cwd: Path = ROOT, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def tool(name: str) -> str:
    """Path of a tool of this environment: another one's versions and settings would judge differently."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{path} is missing: pip install -e '.[dev]'"
    return str(path)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def pyright(folder: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *paths], cwd=folder)


def test_ruff_is_clean():
    done = run([tool("ruff"), "check", "."])
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_catches_a_collective_in_an_algorithm(tmp_path: Path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    sample = "import torch.distributed\n\nprint(torch.distributed)\n"
    write(tmp_path, {"megatron_rl/algos/sample.py": sample, "megatron_rl/parallel/sample.py": sample})
    done = run([tool("ruff"), "check", "--no-cache", "--output-format", "concise", "."], cwd=tmp_path)
    assert done.returncode == 1
    assert "algos/sample.py:1:8: TID251" in done.stdout
    assert "parallel/sample.py" not in done.stdout


def test_pyright_is_clean(pyright_result: tuple[int, str]):
    status, output = pyright_result
    assert status == 0, output


def test_pyright_catches_a_wrong_type_and_a_missing_module(tmp_path: Path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    sample = "import nowhere_to_be_found\n\nnumber: int = 'text'\n"
    write(tmp_path, {"megatron_rl/__init__.py": "", "megatron_rl/sample.py": sample})
    done = pyright(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reportMissingImports" in done.stdout
    assert "reportAssignmentType" in done.stdout


def test_layers_point_down():
    done = run([tool("lint-imports"), "--no-cache", "--no-logo"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_layer_check_catches_an_upward_import_and_a_module_without_layer(tmp_path: Path):
    write(tmp_path, LAYERED_SAMPLE)
    done = run([tool("lint-imports"), "--no-cache", "--no-logo"], cwd=tmp_path)
    assert done.returncode == 1
    assert "sample.low is not allowed to import sample.top" in done.stdout
    assert "sample.stray" in done.stdout


@pytest.mark.parametrize(
    "module", ["megatron_rl.errors", "megatron_rl.config", "megatron_rl.rewards", "megatron_rl.cli"]
)
def test_the_login_node_path_loads_without_torch(module: str):
    script = f"import {module}, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_package_never_imports_tools():
    importers = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "megatron_rl").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("import tools", "from tools"))
    ]
    assert not importers
