"""Preflight: what this machine lacks is said before Ray starts, all of it at once."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from megatron_rl.cluster import preflight as module
from megatron_rl.cluster.preflight import installed, preflight, save_bytes
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def config(tmp_path: Path, *, cluster: ClusterConfig | None = None, trainer: TrainerConfig | None = None) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    return RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(train_files=["x.jsonl"]),
        cluster=cluster or ClusterConfig(device="cpu"),
        trainer=trainer or TrainerConfig(default_local_dir=str(tmp_path / "runs")),
    )


def faults_of(cfg: RunConfig, needs_rollout: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(cfg, needs_rollout)
    return [str(fault) for fault in caught.value.faults]


def test_a_machine_that_can_run_passes_and_nothing_is_made(tmp_path):
    preflight(config(tmp_path), needs_rollout=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_packages_name_the_pip_command_and_only_what_the_run_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "installed", lambda package: package not in ("vllm", "ray"))
    ray, vllm = faults_of(config(tmp_path))
    assert ray == (
        "cluster.backend: 'ray' -- needs the package ray, which is not installed "
        "-- run `bash launch/install.sh`, or `pip install -e .[cpu]`"
    )
    assert vllm.startswith("rollout.name: 'vllm' -- needs the package vllm")
    assert len(faults_of(config(tmp_path), needs_rollout=False)) == 1
    preflight(config(tmp_path, cluster=ClusterConfig(device="cpu", backend="inline")), needs_rollout=False)
    on_gpu = ClusterConfig(device="cuda", backend="inline", ray_address="elsewhere:1")
    assert "pip install -e .[gpu]" in faults_of(config(tmp_path, cluster=on_gpu))[0]


def test_installed_looks_without_importing():
    assert installed("json.decoder") and installed("pytest")
    assert not installed("no_such_package_here") and not installed("no_such_package_here.sub")


def test_all_faults_of_the_machine_come_at_once(tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("a file")
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        cluster = ClusterConfig(device="cpu", n_gpus_per_node=1000, num_cpus_per_rank=4.0, ray_port=port)
        cpus, folder, taken, *_ = faults_of(  # more where the limit of open files is low
            config(tmp_path, cluster=cluster)
        )
    assert cpus.startswith("cluster.num_cpus_per_rank: 4.0 -- 1000 ranks ask for 4000 CPUs, but this node has ")
    assert "runs is a file -- name a folder" in folder
    assert taken.startswith(f"cluster.ray_port: {port} -- something on this machine already listens there")


def test_gpus_that_are_not_there(tmp_path, monkeypatch):
    import torch

    cluster = ClusterConfig(device="cuda", n_gpus_per_node=2, num_cpus_per_rank=0.1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert faults_of(config(tmp_path, cluster=cluster))[0].startswith("cluster.device: 'cuda' -- torch sees no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert faults_of(config(tmp_path, cluster=cluster)) == [
        "cluster.n_gpus_per_node: 2 -- this node has 1 GPUs -- write 1 or less, or use more nodes"
    ]
    elsewhere = ClusterConfig(device="cuda", n_gpus_per_node=8, ray_address="head:6379")
    preflight(config(tmp_path, cluster=elsewhere), needs_rollout=True)
    in_a_job = config(tmp_path, cluster=ClusterConfig(device="cuda", nnodes=2, n_gpus_per_node=8))
    with monkeypatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "head:6379")
        preflight(in_a_job, needs_rollout=True)
        patch.setenv("RAY_ADDRESS", "http://head:8265")
        assert faults_of(in_a_job) == [
            "RAY_ADDRESS: 'http://head:8265' -- is no address of a Ray head, which has the form host:port "
            "-- write the address that `ray start --head` printed, or unset RAY_ADDRESS"
        ]


def test_several_nodes_need_a_cluster(tmp_path):
    (fault,) = faults_of(config(tmp_path, cluster=ClusterConfig(device="cpu", nnodes=2, num_cpus_per_rank=0.1)))
    assert fault.startswith("cluster.nnodes: 2 -- a Ray that this run starts has one node") and "RAY_ADDRESS" in fault


def test_a_disk_too_small_for_a_save_is_said_with_both_sizes(tmp_path, monkeypatch):
    shape_bytes = 4 * (1000 * 1024 + 2 * (4 * 1024 * 1024 + 3 * 1024 * 2048 + 2 * 1024) + 1024)
    assert save_bytes(str(config(tmp_path).model.path), "float32") == shape_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=shape_bytes + 1))
    preflight(config(tmp_path), needs_rollout=True)
    often = TrainerConfig(default_local_dir=str(tmp_path / "runs"), save_freq=5)
    (fault,) = faults_of(config(tmp_path, trainer=often))
    assert "0.08 GiB free, and saving the model takes about 0.16 GiB" in fault
    with pytest.raises(
        ConfigError, match=r"about 0.08 GiB, 1 checkpoint with the optimizer 0.25 GiB -- .*checkpoint.freq=0"
    ):
        preflight(config(tmp_path), needs_rollout=True, trains=True)
    with pytest.raises(ConfigError, match=r"about 0.16 GiB, 3 checkpoints with the optimizer 0.74 GiB"):
        preflight(config(tmp_path, trainer=often), needs_rollout=True, trains=True)
    for step in (5, 10):
        (tmp_path / "runs" / often.experiment_name / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"1 checkpoint with"):
        preflight(config(tmp_path, trainer=often), needs_rollout=True, trains=True)
    never = TrainerConfig(default_local_dir=str(tmp_path / "runs"), save_freq=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    preflight(config(tmp_path, trainer=never), needs_rollout=True)
