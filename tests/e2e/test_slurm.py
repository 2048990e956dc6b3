"""launch/slurm.sbatch: with programs in place of Slurm's that write down what they are asked, and under Slurm itself.

The stand-ins know the words of the steps: what they answer stands in files of the test. The tests under Slurm need its
programs and root (tests/helpers/slurm_cluster.py), and are long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers import slurm_cluster
from tests.helpers.slurm_cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch/slurm.sbatch"

# srun: a line of JSON for each step, then what the step's command would do.
FAKE_SRUN = r"""#!/usr/bin/env python3
import json, os, sys, time
from pathlib import Path

here = Path(os.environ["STAND_IN"])
words = sys.argv[1:]
options = [word for word in words if word.startswith("-") and word != "-c"]
text = " ".join(words)
kind = next(name for name in ("check", "worker", "wait", "train") if name in text.split() or f"{name} " in text)
kind = {"worker": "nodes"}.get(kind, kind)
names = ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RL_ADDRESS_FILE", "RL_JOB")
step = {"kind": kind, "words": words, "options": options, "env": {name: os.environ.get(name) for name in names}}

def note(entry):
    with open(here / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(entry) + "\n")

def say(name):
    file = here / name
    return file.read_text().strip() if file.exists() else ""

note(step)
output = [word.partition("=")[2] for word in options if word.startswith("--output=")]
if output and "%" not in output[0]:
    Path(output[0]).write_text(say("check.says") + "\n")
if kind == "nodes":
    if say("nodes.code"):
        sys.exit(int(say("nodes.code")))
    Path(os.environ["RL_ADDRESS_FILE"]).write_text("10.0.0.1:6000\n")
heard = []
if kind in ("nodes", "train"):
    assert sys.stdin.readline() == "#end\n"
    if kind == "nodes" or say("train.waits"):
        (here / f"{kind}.runs").touch()
        for line in sys.stdin:
            heard.append(line.strip())
            if kind == "train":
                break
    note({"kind": f"{kind} ends", "heard": heard})
sys.exit(int(say(f"{kind}.code") or 0))
"""
FAKE_OTHER = """#!/usr/bin/env bash
printf '{"kind": "%s", "words": ["%s"]}\\n' "$(basename "$0")" "$*" >>"$STAND_IN/calls.jsonl"
[ "$(basename "$0")" != squeue ] || cat "$STAND_IN/state"
"""


@dataclass
class StandIn:
    """A folder with stand-ins of srun, scontrol and squeue, and a checkout in which a job is started."""

    folder: Path
    checkout: Path
    env: dict[str, str] = field(default_factory=dict[str, str])

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        job = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_SUBMIT_DIR": str(self.checkout),
            "SLURM_GPUS_ON_NODE": "8",
            "SLURMD_NODENAME": "n1",
        }
        path = f"{self.folder}:{os.environ['PATH']}"
        own = {"PATH": path, "STAND_IN": str(self.folder), "HOME": os.environ.get("HOME", "/")}
        return subprocess.Popen(
            ["bash", str(SBATCH), *arguments],
            cwd="/",
            env={**own, **job, **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **env: str) -> tuple[int, str]:
        """(exit code, output) of a job."""
        process = self.start(*arguments, **env)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def answer(self, **answers: str | int) -> None:
        """What steps answer: check_code=2 writes the file check.code."""
        for name, value in answers.items():
            (self.folder / name.replace("_", ".")).write_text(str(value))

    def calls(self) -> list[dict[str, object]]:
        lines = (self.folder / "calls.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def kinds(self) -> list[str]:
        return [str(call["kind"]) for call in self.calls()]

    def step(self, kind: str) -> dict[str, list[str]]:
        return next(call for call in self.calls() if call["kind"] == kind)  # type: ignore[return-value]


@pytest.fixture
def slurm(tmp_path: Path) -> StandIn:
    folder, checkout = tmp_path / "bin", tmp_path / "checkout"
    folder.mkdir()
    (checkout / "launch").mkdir(parents=True)
    (checkout / "launch/ray_node.sh").touch()
    for name, text in {"srun": FAKE_SRUN, "scontrol": FAKE_OTHER, "squeue": FAKE_OTHER}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "state").write_text("RUNNING\n")
    return StandIn(folder, checkout)


STEPS = ["check", "nodes", "wait", "train", "train ends", "nodes ends"]


def test_a_job_checks_starts_nodes_waits_for_them_and_trains(slurm: StandIn):
    code, out = slurm.run("configs/a.yaml", "trainer.seed=1")
    assert code == 0, out
    assert slurm.kinds() == STEPS
    check, nodes, wait, train = (slurm.step(kind) for kind in ("check", "nodes", "wait", "train"))
    assert check["words"][-4:] == ["megatron-rl", "check", "configs/a.yaml", "trainer.seed=1"]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--overlap", "--no-kill"} <= set(nodes["options"])
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= set(nodes["options"])
    logs = slurm.checkout / "runs/slurm/4711"
    assert f"--output={logs}/%N.log" in nodes["options"]
    # 2 nodes, 16 GPUs, 900 s
    assert wait["words"][-6:] == ["launch/ray_node.sh", "wait", "10.0.0.1:6000", "2", "16", "900"]
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n1", "--overlap"} <= set(train["options"])
    command = ["megatron-rl", "train", "configs/a.yaml", "trainer.seed=1"]
    assert train["words"][-9:] == ["bash", "launch/ray_node.sh", "--stdin", "run", "10.0.0.1:6000", *command]


def test_a_config_that_is_refused_starts_no_node(slurm: StandIn):
    slurm.answer(check_code=2, check_says="actor.tp: 3 -- does not divide")
    code, out = slurm.run("configs/a.yaml")
    assert code == 2
    assert "actor.tp: 3 -- does not divide" in out
    assert slurm.kinds() == ["check"]


@pytest.mark.parametrize("train_code", [2, 129, 1])
def test_the_code_of_the_run_is_the_code_of_the_job(slurm: StandIn, train_code: int):
    slurm.answer(train_code=train_code)
    code, out = slurm.run("configs/a.yaml")
    assert code == train_code
    assert slurm.kinds() == STEPS, out


def test_nodes_that_do_not_join_end_the_job(slurm: StandIn):
    slurm.answer(wait_code=2)
    code, _ = slurm.run("configs/a.yaml")
    assert code == 2
    assert slurm.kinds() == ["check", "nodes", "wait", "nodes ends"]


def test_a_head_that_does_not_start_ends_the_job(slurm: StandIn):
    slurm.answer(nodes_code=1)
    code, out = slurm.run("configs/a.yaml")
    assert code == 2
    assert "Ray's head did not start" in out and "runs/slurm/4711" in out
    assert slurm.kinds() == ["check", "nodes"]


def stopped(slurm: StandIn, number: signal.Signals) -> tuple[int, str]:
    """(exit code, output) of a job that gets a signal while it trains and whose run then ends with 75."""
    slurm.answer(train_code=75, train_waits="yes")
    process = slurm.start("configs/a.yaml")
    until = time.monotonic() + 30
    while not (slurm.folder / "train.runs").exists():
        assert time.monotonic() < until, "the run does not start"
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_before_the_time_limit_the_run_hears_usr1_and_the_job_queues_again(slurm: StandIn):
    code, out = stopped(slurm, signal.SIGUSR1)
    assert code == 75, out
    assert slurm.kinds() == [*STEPS, "squeue", "scontrol"]
    assert slurm.step("train ends")["heard"] == ["USR1"]
    assert slurm.step("scontrol")["words"] == ["requeue 4711"]
    assert "SIGUSR1: asking the run to save and end" in out


def test_a_job_that_is_stopped_by_hand_does_not_queue_again(slurm: StandIn):
    code, out = stopped(slurm, signal.SIGTERM)
    assert code == 75, out
    assert slurm.step("train ends")["heard"] == ["TERM"]
    assert slurm.kinds() == STEPS
    assert "stopped by hand" in out


@pytest.mark.parametrize("state", ["CANCELLED", "PENDING", ""])
def test_a_job_that_slurm_has_ended_or_queued_itself_does_not_queue_again(slurm: StandIn, state: str):
    slurm.answer(train_code=75, state=state)
    code, out = slurm.run("configs/a.yaml")
    assert code == 75
    assert slurm.kinds() == [*STEPS, "squeue"]
    assert f"the job is {state}: not queued again" in out


def test_each_start_has_a_head_of_its_own_and_each_job_a_secret(slurm: StandIn):
    for attempt in ("0", "1"):
        assert slurm.run("configs/a.yaml", SLURM_RESTART_COUNT=attempt)[0] == 0
    starts = [call["env"] for call in slurm.calls() if call["kind"] == "nodes"]
    files = [Path(start["RL_ADDRESS_FILE"]).name for start in starts]  # type: ignore[index]
    tokens = {start["RAY_AUTH_TOKEN"] for start in starts}  # type: ignore[index]
    assert files == ["head.0", "head.1"]
    assert len(tokens) == 2 and all(re.fullmatch("[0-9a-f]{64}", str(token)) for token in tokens)
    assert {(start["RAY_AUTH_MODE"], start["RL_JOB"]) for start in starts} == {("token", "4711")}  # type: ignore[index]


def test_every_step_runs_in_the_container_that_is_asked_for(slurm: StandIn):
    code, _ = slurm.run("configs/a.yaml", CONTAINER_IMAGE="/images/rl.sqsh", CONTAINER_MOUNTS="/data:/data")
    assert code == 0
    for kind in ("check", "nodes", "wait", "train"):
        options = slurm.step(kind)["options"]
        assert {"--container-image=/images/rl.sqsh", f"--container-workdir={slurm.checkout}"} <= set(options)
        mounts = next(word for word in options if word.startswith("--container-mounts="))
        assert f"{slurm.checkout}:{slurm.checkout}," in mounts and mounts.endswith("/tmp:/tmp,/data:/data")
    code, _ = slurm.run("configs/a.yaml")
    assert not [word for call in slurm.calls()[6:] for word in call.get("options", []) if "container" in word]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "env", "word"),
    [
        (["configs/a.yaml"], {"SLURM_JOB_ID": ""}, "this is a job"),
        ([], {}, "no config"),
        (["configs/a.yaml"], {"SLURM_SUBMIT_DIR": "/"}, "submit from the checkout"),
    ],
)
def test_what_is_missing_is_said_before_any_step(slurm: StandIn, arguments: list[str], env: dict[str, str], word: str):
    code, out = slurm.run(*arguments, **env)
    assert code == 2
    assert word in out
    assert not (slurm.folder / "calls.jsonl").exists()


def test_slurm_is_asked_for_whole_nodes_a_signal_before_the_end_and_a_requeue():
    asked = set(re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(encoding="utf-8"), flags=re.MULTILINE))
    wanted = {"--signal=B:USR1@300", "--requeue", "--open-mode=append", "--exclusive", "--ntasks-per-node=1", "--mem=0"}
    assert wanted <= asked


# Under Slurm itself. A node of Ray is a stand-in at first: it tells what it was asked, and ends as the real one does.
FAKE_NODE = """#!/usr/bin/env bash
if [ "$1" = --stdin ]; then
  shift
  read -r line && [ "$line" = "#end" ] || exit 9
fi
case $1 in
  head) sleep 0.5; echo "$SLURMD_NODENAME:1" >"$RL_ADDRESS_FILE"; cat; echo "head ends" ;;
  worker)
    until [ -s "${2#@}" ]; do sleep 0.1; done
    echo "joined $(cat "${2#@}")"; cat; echo "worker ends"
    ;;
  run)
    [ "$4" = train ] || exit 0
    echo "start ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME: $*"
    [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
    trap "exit 75" TERM
    sleep 300 &
    touch running
    read -r heard
    # Slurm's own signals would have reached this process as well.
    sleep 1
    kill $! && echo "heard $heard"
    exit 75
    ;;
esac
"""
needs_slurm = pytest.mark.skipif(slurm_cluster.why_not() is not None, reason=f"{slurm_cluster.why_not()}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster.two_nodes() as cluster:
        yield cluster


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    """A checkout with the script and a node's stand-in."""
    (tmp_path / "launch").mkdir()
    shutil.copy(SBATCH, tmp_path / "launch")
    (tmp_path / "launch/ray_node.sh").write_text(FAKE_NODE)
    return tmp_path


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def started(cluster: SlurmCluster, checkout: Path) -> str:
    """The number of a job that trains."""
    job = cluster.sbatch("launch/slurm.sbatch", "a.yaml", cwd=checkout)
    wait_until((checkout / "running").exists, "the run does not start")
    return job


@needs_slurm
def test_under_slurm_a_job_that_saved_goes_on_by_itself(cluster: SlurmCluster, submitted: Path):
    job = started(cluster, submitted)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    end = cluster.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 120)
    out = (submitted / f"slurm-{job}.out").read_text()
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("COMPLETED", "1", "0:0"), out
    command = "run n1:1 megatron-rl train a.yaml"
    assert f"start 0 on n1: {command}" in out and f"start 1 on n1: {command}" in out
    assert "heard USR1" in out
    # Both starts: a head and a worker that joined it, ended before the job did.
    logs = submitted / "runs/slurm" / job
    assert (logs / "n1.log").read_text().count("head ends") == 2
    assert (logs / "n2.log").read_text().count("joined n1:1\nworker ends") == 2


@needs_slurm
def test_under_slurm_a_job_that_is_stopped_by_hand_ends(cluster: SlurmCluster, submitted: Path):
    job = started(cluster, submitted)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    end = cluster.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 60)
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("FAILED", "0", "75:0")
    assert "heard TERM" in (submitted / f"slurm-{job}.out").read_text()


@needs_slurm
def test_under_slurm_a_cancelled_job_does_not_come_back(cluster: SlurmCluster, submitted: Path):
    job = started(cluster, submitted)
    cluster.run("scancel", job)
    cluster.wait_for(job, ("CANCELLED",), 60)
    wait_until(lambda: not cluster.processes(), f"left on the nodes: {cluster.processes()}")
    assert cluster.job(job)["JobState"] == "CANCELLED"


@pytest.mark.slow
@needs_slurm
def test_under_slurm_a_run_over_two_nodes_outlives_its_time_limit(cluster: SlurmCluster, tmp_path: Path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("launch", "megatron_rl", "configs"):
        (checkout / name).symlink_to(ROOT / name)
    data = checkout / "runs/quickstart/data"
    make = [sys.executable, str(ROOT / "examples/quickstart/make_data.py"), str(data)]
    subprocess.run(make, check=True, timeout=120, capture_output=True)
    settings = ["cluster.nnodes=2", "data.train_batch_size=512", "actor.optim.lr_warmup_steps=5"]
    length = ["trainer.total_training_steps=200", "trainer.target_loss=null", "trainer.test_freq=0"]
    job = cluster.sbatch(
        *("--time=60", "--signal=B:USR1@90", "launch/slurm.sbatch", "configs/sft-add2-1n1g.yaml", *settings, *length),
        cwd=checkout,
        env={"PYTHON": sys.executable},
    )
    metrics = checkout / "runs/quickstart/sft/metrics.jsonl"
    wait_until(lambda: len(trained_steps(metrics)) >= 2, f"no step: {job_words(checkout)}", 300)
    # The limit comes near while the run trains: Slurm, which looks every 30 s, sends its signal.
    minutes = int(cluster.job(job)["RunTime"].split(":")[1]) + 2
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "the job is not queued again", 180)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    end = cluster.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 600)
    out = job_words(checkout)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "1"), out
    assert "SIGUSR1: asking the run to save and end" in out
    assert trained_steps(metrics) == list(range(1, 201))
    # A rank a node, in both starts.
    assert len(re.findall(r"^0 +n1 +10.77.0.1 ", out, re.MULTILINE)) == 2, out
    assert len(re.findall(r"^1 +n2 +10.77.0.2 ", out, re.MULTILINE)) == 2, out
    wait_until(lambda: not cluster.processes(), f"left on the nodes: {cluster.processes()}")


def trained_steps(metrics: Path) -> list[int]:
    """The steps whose loss a run has written so far."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    return [row["step"] for row in map(json.loads, lines) if "sft/loss" in row]


def job_words(checkout: Path) -> str:
    """What the jobs of a checkout have said."""
    return "\n".join(path.read_text() for path in sorted(checkout.glob("slurm-*.out")))
