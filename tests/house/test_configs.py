"""Every file in configs/ is a complete run or a pipeline, loads without a fault, and is what its name says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.pipeline.check import load_pipeline
from tests.helpers.config import make_model, make_published_model, write_headers

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("**/*.y*ml"))
PIPELINES = [path for path in FILES if path.name.startswith("pipeline-")]
CONFIGS = [path for path in FILES if path not in PIPELINES]
NAME = re.compile(r"([a-z]+)-([a-z0-9.-]+)-(\d+)n(\d+)g(-[a-z0-9.-]+)?\.yaml")
CLUSTER = {
    "grpo-qwen2.5-7b-1n8g.yaml": ("Qwen2.5-7B-Instruct", "qwen2.5/7b"),
    "grpo-qwen2.5-7b-1n2g-lora.yaml": ("Qwen2.5-7B-Instruct", "qwen2.5/7b"),
    "grpo-qwen2.5-32b-2n8g.yaml": ("Qwen2.5-32B-Instruct", "qwen2.5/32b"),
    "grpo-qwen3-30b-a3b-8n8g.yaml": ("Qwen3-30B-A3B", "qwen3/30b-a3b"),
    "grpo-qwen3-235b-a22b-64n8g.yaml": ("Qwen3-235B-A22B", "qwen3/235b-a22b"),
}
"""Config of a cluster -> (folder of its model, name of the model's shape)."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout whose examples ran: their data, and models where SFT and the user put theirs.

    Configs name files, whose content no check of a config reads: those of the examples are stand-ins here.
    """
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    script = "examples/quickstart/make_data.py"
    command = [sys.executable, script, "runs/quickstart/data"]
    subprocess.run(command, cwd=folder, check=True, timeout=120, capture_output=True)
    trained = folder / "runs/quickstart/sft/final"
    shutil.copytree(folder / "runs/quickstart/data/model", trained)
    write_headers(trained)
    shutil.copytree(trained, folder / "runs/reasoning_gym/sft/final")
    for small in ("Qwen2.5-0.5B-Instruct", "SmolLM2-135M-Instruct"):
        make_model(folder / "models" / small, max_position_embeddings=32768)
    for model, shape in CLUSTER.values():
        make_published_model(folder / "models" / model, shape)
    for example in ("reasoning_gym", "gsm8k", "customer_service"):
        for name in ("train", "val", "test", "sft_train", "sft_val"):
            file = folder / f"runs/{example}/data/{name}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    for name in ("data/pairs_train", "data/pairs_val", "rm_data/pairs_train", "rm_data/pairs_val"):
        file = folder / f"runs/preferences/{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


def test_the_quick_start_has_its_configs():
    assert {"sft-add2-1n1g.yaml", "grpo-add2-1n1g.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads_and_is_what_its_name_says(path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(checkout)
    config = load_config([str(path)])
    name = NAME.fullmatch(path.name)
    assert name, f"{path.name}: name it <algorithm>-<model>-<n>n<g>g[-<strategy>].yaml"
    assert config.algorithm.name == {"rm": "reward_model"}.get(name[1], name[1])
    assert config.cluster.nnodes == int(name[3])
    assert config.cluster.n_gpus_per_node == int(name[4])


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_pipeline_is_checked_and_its_folder_has_its_name(path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(checkout)
    # Its stages' configs are named as in a checkout.
    (checkout / "configs").symlink_to(ROOT / "configs")
    assert load_pipeline(str(path), []).folder == Path("runs", path.stem)


@pytest.mark.parametrize("name", CLUSTER)
def test_check_and_plan_answer_for_each_config_of_a_cluster(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(checkout)
    path = ROOT / "configs" / name
    sizes = NAME.fullmatch(name)
    assert sizes
    started = time.monotonic()
    assert main(["check", str(path)]) == 0
    ranks = int(sizes[3]) * int(sizes[4])
    out = capsys.readouterr().out
    assert re.search(rf"ranks +{ranks} ", out)
    assert f"sbatch --nodes={sizes[3]} launch/slurm.sbatch configs/{name}" in path.read_text(encoding="utf-8")
    assert main(["plan", str(path)]) == 0
    plan = capsys.readouterr().out
    assert "moved / minimum: 1.00" in plan
    # Each GPU of 80 GB (141 GB for the largest) holds what the plan counts, with room for activations.
    update = re.search(r"\n  update +([\d.]+) ", plan)
    assert update
    assert float(update[1]) < (60 if ranks < 512 else 100)
    assert time.monotonic() - started < 15


def test_loading_catches_a_fault_in_a_config(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(checkout)
    broken = checkout / "broken.yaml"
    text = (ROOT / "configs/sft-add2-1n1g.yaml").read_text(encoding="utf-8")
    broken.write_text(text.replace("target_loss", "targt_loss"), encoding="utf-8")
    with pytest.raises(ConfigError, match="targt_loss"):
        load_config([str(broken)])
