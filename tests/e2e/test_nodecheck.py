"""`megatron-rl check --cluster` over two raylets of this machine, of which one has other packages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart import make_data

ROOT = Path(__file__).resolve().parents[2]

TWO_NODES = """if True:
    import sys
    from ray.cluster_utils import Cluster
    from megatron_rl.cli import main

    path, *arguments = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
        sys.exit(main(["check", *arguments, f"cluster.ray_address={cluster.address}"]))
    finally:
        cluster.shutdown()
"""
"""The second node's ranks see the packages of `path` first."""


def settings(folder: Path) -> list[str]:
    make_data.make(folder, 0)
    return [
        f"model.path={folder}/model",
        "model.init=random",
        f"data.train_files={folder}/sft_train.parquet",
        "algorithm.name=sft",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "cluster.device=cpu",
        f"trainer.default_local_dir={folder}/runs",
    ]


def check(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TWO_NODES, path, *arguments, "cluster.nnodes=2", "--cluster"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)


def test_two_nodes_are_told_as_a_table_and_a_slow_link_by_its_ends(tmp_path: Path) -> None:
    told = check(str(ROOT), *settings(tmp_path), "cluster.expected_gbps=1e6")
    host = platform.node()
    lines = told.stdout[told.stdout.index("\nnodes\n") :].split("\n")[2:]
    assert lines[0].split() == ["node", f"{host}#1", f"{host}#2"], told.stderr
    assert lines[-3].startswith("links between nodes: 1 pairs of ranks") and lines[-2].startswith("all-reduce")
    assert told.returncode == 2 and "1 fault of the nodes" in told.stderr, told.stderr
    assert f"  {host}#1 rank 0 - {host}#2 rank 1: link between nodes -- " in told.stderr
    assert "expected: 1e+06" in told.stderr


@pytest.mark.slow
def test_a_node_with_other_packages_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "site/transformers-9.9.9.dist-info").mkdir(parents=True)
    (tmp_path / "site/transformers-9.9.9.dist-info/METADATA").write_text("Name: transformers\nVersion: 9.9.9\n")
    refused = check(f"{tmp_path}/site:{ROOT}", *settings(tmp_path))
    assert refused.returncode == 2
    assert "1 fault of the nodes" in refused.stderr, refused.stderr
    assert "version of transformers -- 9.9.9, where 1 of 2 nodes have" in refused.stderr
    assert "links" not in refused.stdout and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_one_node_is_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_rl", "check", *settings(tmp_path), "--cluster"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert f"\nnode {platform.node()}: {len(os.sched_getaffinity(0))} CPUs" in told.stdout
