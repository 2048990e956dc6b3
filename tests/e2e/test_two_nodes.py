"""Runs over two nodes with addresses of their own, started by launch/ray_cluster.sh as on a cluster.

The nodes are network namespaces (tests/helpers/two_nodes.py); RL_SSH enters one where ssh would.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.quickstart.make_data import make
from tests.helpers.two_nodes import TwoNodes, environment, two_nodes, why_not

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "ray_cluster.sh"
WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

REWARD = "def score(sample):\n    return float(len(sample.solution_str) % 2)\n"
TIMES = ("time/", "perf/", "memory/", "sync/")


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "data"
    make(folder, seed=0)
    (folder / "reward.py").write_text(REWARD)
    return folder


def train(data: Path, name: str, *overrides: str) -> list[str]:
    own = [
        f"model.path={data / 'model'}",
        "model.init=random",
        f"data.train_files={data / 'train.parquet'}",
        f"reward.function={data / 'reward.py'}:score",
        f"trainer.default_local_dir={data.parent}",
        f"trainer.experiment_name={name}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "data.val_files=[]",
        "data.train_batch_size=8",
        "actor.optim.lr_warmup_steps=0",
        "rollout.name=hf",
        "cluster.num_cpus_per_rank=0.5",
    ]
    return [sys.executable, "-m", "megatron_rl", "train", str(ROOT / "configs/grpo-add2-1n1g.yaml"), *own, *overrides]


def port_locks() -> set[Path]:
    """Files by which launch/ray_node.sh takes its ports; one whose script was killed stays, and is taken again."""
    return set(Path("/tmp").glob(".rl-ports-*"))


LOCKS_BEFORE = port_locks()


def start(nodes: TwoNodes, logs: Path, command: list[str], **env: str) -> subprocess.Popen[str]:
    """launch/ray_cluster.sh over both nodes, with one CPU each."""
    own = {"RL_SSH": nodes.ssh, "RL_CPUS": "1", "RL_LOG_DIR": str(logs), "RL_WAIT_S": "90", "PYTHON": sys.executable}
    return subprocess.Popen(
        ["bash", str(SCRIPT), "n1", "n2", "--", *command],
        cwd=ROOT,
        env={**environment(), **own, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(run: subprocess.Popen[str], timeout_s: float, code: int = 0) -> str:
    """What the run printed."""
    try:
        out, _ = run.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        run.terminate()
        out, _ = run.communicate(timeout=60)
        pytest.fail(f"not done after {timeout_s:g} s:\n{out[-6000:]}")
    assert run.returncode == code, out[-6000:]
    return out


def steps(data: Path, name: str) -> list[dict[str, float]]:
    """What each step of a run says of learning: without times, speeds and sizes of memory."""
    file = data.parent / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(TIMES)} for line in lines]


def until(condition: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.2)


def nothing_is_left(nodes: TwoNodes) -> None:
    until(lambda: nodes.pids() == [], 60, lambda: f"left on the nodes: {nodes.command_lines()}")
    assert port_locks() <= LOCKS_BEFORE


def test_ranks_on_two_nodes_learn_as_one_rank_does(nodes: TwoNodes, data: Path) -> None:
    """Data parallel, and with one tensor-parallel group over both nodes, one run after the other in one cluster: the
    metrics agree to five digits and more.
    """
    one = subprocess.Popen(train(data, "one", "cluster.backend=inline"), cwd=ROOT, stdout=subprocess.DEVNULL)
    runs = {"dp": [], "tp": ["actor.tp=2", "cluster.tp_across_nodes=true"]}
    commands = [shlex.join(train(data, name, "cluster.nnodes=2", *words)) for name, words in runs.items()]
    out = finished(start(nodes, data.parent / "logs", ["sh", "-ec", "\n".join(commands)]), 400)
    assert one.wait(timeout=60) == 0
    expected = steps(data, "one")
    assert len(expected) == 2 and expected[-1]["policy/grad_norm"] > 0
    for name in runs:
        for alone, spread in zip(expected, steps(data, name), strict=True):
            assert alone.keys() == spread.keys()
            assert {key: spread[key] for key in alone} == pytest.approx(alone, rel=1e-5, abs=2e-6)
        for line in (rf"0 +n2 +10\.78\.0\.2 +- +{name} 0", rf"1 +n1 +10\.78\.0\.1 +- +{name} 1"):
            assert re.search(line, out), "the table of ranks, in the order of the network"
    assert "NCCL_OWN: node n2 keeps its own 'n2'; the controller has 'n1'" in out
    nothing_is_left(nodes)


def test_nodes_with_ipv6_addresses_alone(data: Path) -> None:
    with two_nodes(ipv4=False) as nodes:
        run = start(nodes, data.parent / "logs-ipv6", train(data, "ipv6", "cluster.nnodes=2"))
        out = finished(run, 300)
        assert "head at [fd78::1]:" in out and re.search(r"0 +n2 +fd78::2 +- +dp 0", out)
        assert len(steps(data, "ipv6")) == 2
        nothing_is_left(nodes)


def test_a_cut_link_is_named_and_the_run_goes_on_once_it_is_back(nodes: TwoNodes, data: Path) -> None:
    """In the middle of a step, with a checkpoint a step: the end is that of the run that nothing broke."""
    layout = ["cluster.nnodes=2", "trainer.total_training_steps=8"]
    whole = start(nodes, data.parent / "logs-whole", train(data, "whole", *layout))
    finished(whole, 300)
    kept = ["checkpoint.freq=1", "trainer.max_restarts=2", "trainer.restart_wait_s=2", "cluster.hang_timeout_s=60"]
    # The head looks every second, and not every three.
    health = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    run = start(nodes, data.parent / "logs-cut", train(data, "cut", *layout, *kept), **health)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(run.stdout.readline, "")) if run.stdout else None)
    reader.start()

    def words() -> str:
        return "".join(lines)[-6000:]

    try:
        until((data.parent / "cut" / "checkpoints" / "latest").exists, 300, words)
        nodes.cut()
        cut_at = time.monotonic()
        until(lambda: any("n2" in line and "lost" in line.lower() for line in lines), 90, words)
        named_s = time.monotonic() - cut_at
        nodes.mend()
        assert run.wait(timeout=300) == 0, words()
    finally:
        nodes.mend()
        if run.poll() is None:
            run.terminate()
        run.wait(timeout=60)
        reader.join(timeout=10)
    print(f"named after {named_s:.1f} s")
    assert steps(data, "cut") == steps(data, "whole")
    nothing_is_left(nodes)


WAITS = """
import os, signal, sys, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("heard", signal.Signals(number).name, flush=True) or (
        number == signal.SIGTERM and sys.exit(75)))
print("runs", os.uname().nodename, os.environ["RAY_ADDRESS"], sys.argv[1:], repr(os.environ["NCCL_X"]), flush=True)
while True:
    time.sleep(0.1)
"""


def test_signals_words_and_the_code_of_the_command_pass_through(nodes: TwoNodes, tmp_path: Path) -> None:
    odd = "a b\n'c' $HOME"
    run = start(nodes, tmp_path / "logs", [sys.executable, "-c", WAITS, odd, ""], NCCL_X=odd)
    try:
        assert run.stdout is not None
        line = next(line for line in iter(run.stdout.readline, "") if line.startswith("runs"))
        assert re.match(r"runs n1 10\.78\.0\.1:\d+ ", line) and line.endswith(f"{[odd, '']!r} {odd!r}\n")
        run.send_signal(signal.SIGUSR1)
        assert run.stdout.readline() == "heard SIGUSR1\n"
        run.send_signal(signal.SIGTERM)
        assert "heard SIGTERM\n" in finished(run, 60, code=75)
    finally:
        run.kill()
        run.wait(timeout=60)
    nothing_is_left(nodes)


def test_nothing_outlives_a_script_that_is_killed(nodes: TwoNodes, tmp_path: Path) -> None:
    run = start(nodes, tmp_path / "logs", [sys.executable, "-c", WAITS], NCCL_X="")
    assert run.stdout is not None
    next(line for line in iter(run.stdout.readline, "") if line.startswith("runs"))
    assert len(nodes.pids()) > 6
    run.kill()
    run.communicate(timeout=60)
    nothing_is_left(nodes)


def test_cuda_on_a_cluster_without_gpus_is_refused_by_what_ray_has(nodes: TwoNodes, data: Path) -> None:
    run = start(nodes, data.parent / "logs-cuda", train(data, "cuda", "cluster.nnodes=2", "cluster.device=cuda"))
    out = finished(run, 300, code=2)
    assert "cluster.device: 'cuda' -- 2 node(s) with 1 GPUs each are asked for" in out and "GPUs: 0, 0" in out
