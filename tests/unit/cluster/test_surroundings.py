"""Home folder, temporary folder, sockets, open files, log-ins: what is wrong with them is said before work starts."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megatron_rl.cluster import surroundings as module
from megatron_rl.cluster.preflight import preflight
from megatron_rl.cluster.surroundings import (
    LONGEST_SOCKET,
    RAY_SOCKET,
    home_faults,
    job_faults,
    login_faults,
    open_file_faults,
    socket_faults,
    temporary_faults,
)
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import ConfigError
from tests.unit.cluster.test_preflight import config


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize(
    ("value", "reason", "cure"),
    [
        ("/no/such/folder", "there is no such folder", "mkdir -p"),
        (__file__, "there is no such folder", "unset"),
        ("", "there is no such folder", "unset"),
    ],
)
def test_a_temporary_folder_that_cannot_be_used(name: str, value: str, reason: str, cure: str) -> None:
    (fault,) = temporary_faults({name: value})
    assert (fault.key, fault.value) == (name, value) and reason in fault.reason and cure in fault.cure


def test_a_temporary_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write everywhere
    (fault,) = temporary_faults({"TMPDIR": str(tmp_path)})
    assert "cannot be written" in fault.reason
    (fault,) = home_faults({"HOME": str(tmp_path / "not" / "made")})
    assert fault.key == "HOME" and f"{tmp_path} cannot be written" in fault.reason and "export HOME=" in fault.cure


@pytest.mark.parametrize(
    ("home", "reason"),
    [("", "not a path from the root"), ("~", "not a path"), ("home/me", "not a path"), (__file__, "is a file")],
)
def test_a_home_that_is_none(home: str, reason: str) -> None:
    (fault,) = home_faults({"HOME": home})
    assert fault.key == "HOME" and reason in fault.reason and "export HOME=" in fault.cure


def test_a_home_that_can_be_made_or_used(tmp_path: Path) -> None:
    assert home_faults({"HOME": str(tmp_path)}) == home_faults({"HOME": str(tmp_path / "new")}) == []


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_path_too_long_for_rays_sockets(name: str) -> None:
    room = LONGEST_SOCKET - len(RAY_SOCKET)
    assert socket_faults({name: "/" + "x" * (room - 1)}) == []
    (fault,) = socket_faults({name: "/" + "x" * room})
    assert fault.key == name and f"leave room for {room}" in fault.reason and "RAY_TMPDIR=/tmp" in fault.cure
    # Ray's own variable comes first.
    assert socket_faults({"TMPDIR": "/" + "x" * 200, "RAY_TMPDIR": "/tmp"}) == []


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    assert open_file_faults(1) == []
    (fault,) = open_file_faults(64)
    assert fault.key == "ulimit -n" and fault.value == 1024 and "64 ranks" in fault.reason and "8192" in fault.cure
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    assert open_file_faults(64) == []


def test_the_folder_of_a_ray_job_is_a_copy() -> None:
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}, "metadata": {}}'}
    (fault,) = job_faults("runs", job)
    assert (fault.key, fault.value) == ("trainer.default_local_dir", "runs") and "Ray deletes" in fault.reason
    assert job_faults("/shared/runs", job) == job_faults("runs", {}) == []
    assert job_faults("runs", {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {}}'}) == []


def test_wandb_without_a_log_in(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    (fault,) = login_faults(["console", "wandb"], home)
    assert (fault.key, fault.value) == ("trainer.logger", "wandb") and "WANDB_MODE=offline" in fault.cure
    assert login_faults(["console", "mlflow"], home) == []
    for known in ({"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "k"}):
        assert login_faults(["wandb"], home | known) == []
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    assert login_faults(["wandb"], home) == []
    (fault,) = login_faults(["wandb"], home | {"WANDB_BASE_URL": "https://wandb.my.org:8080"})
    assert fault.value == "wandb"


def test_preflight_lists_packages_of_loggers_and_surroundings_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/no/such/folder")
    cfg = config(
        tmp_path,
        cluster=ClusterConfig(device="cpu"),
        trainer=TrainerConfig(default_local_dir=str(tmp_path / "runs"), logger=["console", "mlflow"]),
    )
    with pytest.raises(ConfigError) as caught:
        preflight(cfg, needs_rollout=True)
    assert [fault.key for fault in caught.value.faults] == ["trainer.logger", "RAY_TMPDIR"]
    assert "pip install mlflow" in caught.value.faults[0].cure
    assert not (tmp_path / "runs").exists()
