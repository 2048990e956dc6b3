"""launch/: the scripts a newcomer types. pip is a stand-in that writes down what it was asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import main
from tests.helpers.config import make_published_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]

# Answers install.sh's questions as Python 3.11 would, writes each pip call to calls.txt, and fails those that
# match the pattern in fail.txt.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(cd "$(dirname "$0")/../.." && pwd)
case "$*" in
  *"import pip"* | *"import ensurepip"*) echo 3.11 ;;
  *find_spec*) exit 1 ;;
  *"-m pip"*)
    echo "$*" >>"$here/calls.txt"
    if [ -f "$here/fail.txt" ] && [[ "$*" =~ $(cat "$here/fail.txt") ]]; then
      echo "pip's own words"
      exit 1
    fi
    ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a .venv whose python is the stand-in."""
    for name in ("launch", "requirements", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "setup.py", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def bash(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd="/",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def pip_calls(checkout: Path) -> list[str]:
    calls = checkout / "calls.txt"
    return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script: Path):
    assert subprocess.run(["bash", "-n", str(script)], timeout=30).returncode == 0


def linter(name: str) -> str:
    """A program of the development tools, which lies beside the interpreter or on PATH."""
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed: it has no wheel for this machine")
    return program


def test_scripts_are_clean_by_shellcheck():
    done = subprocess.run(
        [linter("shellcheck"), "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_install_does_its_parts_and_is_quick_when_nothing_changed(checkout: Path):
    done = bash(checkout / "launch/install.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    calls = pip_calls(checkout)
    assert "--dry-run" in calls[0]
    assert [".[cpu,dev]" in call for call in calls] == [False, False, True, False]
    assert "--no-deps -r requirements/cpu-no-deps.txt" in calls[-1]
    started = time.monotonic()
    again = bash(checkout / "launch/install.sh")
    assert time.monotonic() - started < 1.0
    assert "up to date" in again.stdout
    assert pip_calls(checkout) == calls


def test_the_cpu_index_is_named_only_where_pip_finds_no_cpu_torch(checkout: Path):
    assert bash(checkout / "launch/install.sh").returncode == 0
    assert not [call for call in pip_calls(checkout) if "extra-index-url" in call]
    (checkout / "calls.txt").unlink()
    (checkout / "setup.py").write_text("changed", encoding="utf-8")
    (checkout / "fail.txt").write_text("--dry-run", encoding="utf-8")
    assert bash(checkout / "launch/install.sh").returncode == 0
    option = "--extra-index-url https://download.pytorch.org/whl/cpu"
    named = [call for call in pip_calls(checkout) if option in call]
    assert len(named) == 1
    assert "torch==2.13.0+cpu" in named[0]


def test_a_failed_install_says_so_and_is_not_taken_for_a_finished_one(checkout: Path):
    (checkout / "fail.txt").write_text("cpu-no-deps", encoding="utf-8")
    failed = bash(checkout / "launch/install.sh")
    assert failed.returncode == 1
    assert "FAILED: vLLM for CPU" in failed.stderr
    assert "pip's own words" in failed.stderr
    assert "run this again" in failed.stderr
    (checkout / "fail.txt").unlink()
    again = bash(checkout / "launch/install.sh", PYTHON="/nonexistent/python")
    assert "did not finish: starting over" in again.stdout
    assert "up to date" not in again.stdout


def test_without_a_usable_python_the_message_names_the_cure(checkout: Path):
    shutil.rmtree(checkout / ".venv")
    failed = bash(checkout / "launch/install.sh", PYTHON="/nonexistent/python")
    assert failed.returncode == 1
    assert "no Python 3.11 was found (PYTHON=/nonexistent/python was asked for)" in failed.stderr
    assert "python3.11-venv" in failed.stderr


def test_the_environment_keeps_what_is_set():
    script = '. "$0"; echo "$OMP_NUM_THREADS $HF_HUB_OFFLINE $VLLM_ENABLE_V1_MULTIPROCESSING"'
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"}
    command = ["bash", "-euc", script, str(ROOT / "launch/env.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["3", "1", "0"], done.stderr


@pytest.mark.parametrize("argument", ["trainer.experiment_name=mine", "trainer.default_local_dir=x", "--frsh"])
def test_the_quick_start_refuses_what_it_cannot_honour_before_any_work(argument: str):
    done = bash(ROOT / "launch/quickstart.sh", argument)
    assert done.returncode == 2
    assert argument in done.stderr


def test_the_slowest_tests_are_kept_and_are_tests_that_exist():
    script = (ROOT / "launch/test.sh").read_text(encoding="utf-8")
    assert "--durations-file tests/durations.txt" in script
    lines = (ROOT / "tests/durations.txt").read_text(encoding="utf-8").splitlines()
    assert 0 < len(lines) <= 25
    names = [line.split(" s  ")[1].partition("[")[0].split("::") for line in lines]
    gone = [f"{file}::{test}" for file, test in names if f"def {test}(" not in text_of(file)]
    assert not gone, f"run launch/test.sh to record them anew: {gone}"


def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_the_commit_hooks_are_local_and_use_this_environments_tools():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "lint-imports"]
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert hook["language"] == "system"
        assert program.startswith(".venv/bin/")
        tool = Path(sys.executable).with_name(Path(program).name)
        done = subprocess.run([tool, *arguments, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


# A node of Ray in place of launch/ray_node.sh: a line for each call; `head` runs until it is ended.
# Where a head is started beside it, `wait` waits for it, as the real one does.
FAKE_NODE = """#!/usr/bin/env bash
[ "$1" != head ] || trap "exit 0" TERM
echo "${RL_NODE_IP:-} ${RL_PORTS:-} $*" >>calls.txt
case $1 in
  head) while :; do sleep 0.1; done ;;
  wait) [ -z "${RL_PORTS:-}" ] || until grep -q " head$" calls.txt; do sleep 0.1; done ;;
  run) exit "$CODE" ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder in which a job's commands run, with a node's stand-in."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/ray_node.sh").write_text(FAKE_NODE, encoding="utf-8")
    return tmp_path


def run_job(job: Path, command: str, code: int, **env: str) -> tuple[int, list[str]]:
    """(exit code of a job's command, calls of nodes). code: of the run."""
    path = os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-c", command], cwd=job, env={"PATH": path, "CODE": str(code), **env}, capture_output=True, timeout=60
    )
    return done.returncode, (job / "calls.txt").read_text(encoding="utf-8").splitlines()


def assert_check_takes(call: str, job: Path) -> None:
    """The arguments of the run in a call of `ray_node.sh run` are a config, though its model and data are not here."""
    words = call.partition("megatron-rl train ")[2].split()
    assert (ROOT / words[0]).is_file()
    model = make_published_model(job / "model", "qwen2.5/32b")
    data = job / "train.parquet"
    data.touch()
    here = [f"model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    folders = [f"data.cache_dir={job}/cache", f"trainer.default_local_dir={job}/runs"]
    assert main(["check", str(ROOT / words[0]), *words[1:], *here, *folders]) == 0


def kuberay() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "launch/kuberay.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", [0, 75])
def test_the_ray_job_waits_for_its_pods_and_trains(code: int, job: Path):
    entrypoint = kuberay()["spec"]["entrypoint"].replace("/workspace/megatron_rl", str(job))
    ended, calls = run_job(job, entrypoint, code, RAY_ADDRESS="10.0.0.1:6379")
    assert ended == code
    wait, run = calls
    cluster = kuberay()["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert wait.split() == [
        "wait",
        "10.0.0.1:6379",
        str(workers["replicas"] + 1),
        str(workers["replicas"] * gpus),
        "1800",
    ]
    assert run.split()[:2] == ["run", "10.0.0.1:6379"]
    assert_check_takes(run, job)


def test_the_ray_job_has_what_the_operator_requires():
    job = kuberay()
    assert (job["apiVersion"], job["kind"], set(job)) == (
        "ray.io/v1",
        "RayJob",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    cluster = job["spec"]["rayClusterSpec"]
    pins = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'"ray=={cluster["rayVersion"]}"' in pins
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    pods = [template["spec"] for template in (cluster["headGroupSpec"]["template"], workers["template"])]
    images = {pod["containers"][0]["image"] for pod in [*pods, job["spec"]["submitterPodTemplate"]["spec"]]}
    assert len(images) == 1
    for pod in pods:
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shm": "/dev/shm", "shared": "/shared"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


def sky() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "launch/sky.yaml").read_text(encoding="utf-8"))


def sky_environment(rank: int) -> dict[str, str]:
    """What SkyPilot sets on a machine of a job."""
    gpus = sky()["resources"]["accelerators"].partition(":")[2]
    nodes = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    return {**nodes, **sky()["envs"], "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RAY_AUTH_TOKEN": "secret"}


@pytest.mark.parametrize("code", [0, 75])
def test_skypilots_first_machine_is_head_and_driver(code: int, job: Path):
    ended, calls = run_job(job, sky()["run"], code, **sky_environment(0))
    assert ended == code
    assert sorted(calls)[0] == "10.0.0.1 20000 head"
    wait, run = (call for call in calls if call.split()[2] != "head")
    assert wait.split()[2:] == ["wait", "10.0.0.1:20000", "2", "16", "900"]
    assert run.split()[2:4] == ["run", "10.0.0.1:20000"]
    assert_check_takes(run, job)


def test_skypilots_other_machines_join_the_first(job: Path):
    ended, calls = run_job(job, sky()["run"], 0, **sky_environment(1))
    assert (ended, calls) == (0, ["10.0.0.2 20000 worker 10.0.0.1:20000"])


def test_skypilot_starts_again_what_saved_and_ended():
    recovery = sky()["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [75]
    assert sky()["secrets"] == {"RAY_AUTH_TOKEN": None}


def test_the_image_has_the_pins_of_the_package():
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pins = dict(
        re.findall(r'"([\w-]+)==([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8").partition("GPU = [")[2])
    )
    assert f"torch=={pins['torch']} " in image and f'"ray[default]=={pins["ray"]}"' in image
    words = image.partition("\nFROM ")[0]
    for name, version in {"torch": pins["torch"], "Ray": pins["ray"], "vLLM": pins["vllm"]}.items():
        assert f"{name} {version.rpartition('.')[0]}" in words
    assert f"Megatron-Core {pins['megatron-core']}" in words


def test_the_image_is_clean_by_hadolint():
    done = subprocess.run([linter("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
