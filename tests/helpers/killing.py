"""Runs that are killed at random moments and begun again with the same command."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
MARK = "MEGATRON_RL_TEST_OF_KILLS"
STEPS = 6
ALGORITHMS = ("sft", "grpo", "ppo")
NOT_OF_THE_MODEL = ("time/", "perf/", "mem", "offload/", "checkpoint/", "sync/seconds")
"""Metrics of the machine."""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(sum(map(ord, solution_str)) % 3), "length": len(solution_str)}
"""
MOST_STARTS = 4
END_S = 240.0


def settings(data: Path, runs: Path, algorithm: str, *more: str) -> list[str]:
    """A run of a few steps of which each writes a checkpoint."""
    sft = algorithm == "sft"
    reward = data.parent / "reward.py"
    reward.write_text(REWARD)
    own = {
        "model.path": data / "model",
        "model.init": "random",
        # Fewer rows than the steps take: the run's epochs pass by.
        "data.train_files": _rows(data / ("sft_train.parquet" if sft else "train.parquet"), 40),
        "data.val_files": _rows(data / ("sft_val.parquet" if sft else "val.parquet"), 8),
        "data.train_batch_size": 16,
        "actor.optim.lr": 1e-3,
        "actor.optim.lr_warmup_steps": 2,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 3,
        "trainer.test_freq": 0,
        "trainer.target_loss": "null",
        "trainer.default_local_dir": runs,
        "trainer.overwrite": "replace",
        "checkpoint.freq": 1,
        "cluster.num_cpus_per_rank": 0.5,
        "cluster.device": "cpu",
    }
    if not sft:
        own |= {
            "actor.ppo_mini_batch_size": 8,
            "data.max_response_length": 5,
            "rollout.name": "hf",
            "rollout.n": 2,
            "reward.function": f"{reward}:score",
            "reward.num_workers": 1,
            "algorithm.use_kl_in_reward": "true",
            "algorithm.kl_ctrl.type": "adaptive",
            "trainer.test_freq": 2,
        }
    if algorithm == "ppo":
        own |= {"critic.share_backbone": "false", "critic.optim.lr": 1e-3, "actor.ppo_epochs": 1}
    return [str(REPO / "configs" / f"{algorithm}-add2-1n1g.yaml"), *(f"{k}={v}" for k, v in own.items()), *more]


def _rows(file: Path, count: int) -> Path:
    """The first rows of a data set, as a set of its own."""
    import pyarrow.parquet as parquet

    few = file.with_name(f"{file.stem}_{count}.parquet")
    if not few.exists():
        parquet.write_table(parquet.read_table(file).slice(0, count), few)
    return few


@dataclass
class Killed:
    """What became of a run that was killed once."""

    victim: str
    moment: str
    codes: list[int] = field(default_factory=list[int])
    """Exit code of each start."""


SERVER = """
import json, os, sys
from megatron_rl.mcore import cpu
cpu.install()
import matplotlib.pyplot, pyarrow.parquet, transformers
import megatron_rl.rollout.hf_engine, megatron_rl.runs.verbs, megatron_rl.workers.model
from megatron_rl.cli import main
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ[task["name"]] = task["mark"]
        sys.argv = ["megatron_rl"]
        code = 99
        try:
            code = main([task["verb"], *task["arguments"]])
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Warm:
    """Starts runs as copies of a process that has imported everything, which takes most of a short run's time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO
        )

    def start(self, arguments: list[str], log: Path, verb: str = "train") -> Process:
        """One start of a run, or of another verb."""
        mark, server = f"{os.getpid()}-{time.monotonic_ns()}", self._server
        assert server.stdin is not None and server.stdout is not None
        task = {"verb": verb, "arguments": arguments, "log": str(log), "name": MARK, "mark": mark}
        log.touch()
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        return Process(pid, mark, log, server.stdout.readline)

    def close(self) -> None:
        """End the process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)


class Cold:
    """Starts runs as a user does."""

    def start(self, arguments: list[str], log: Path) -> Process:
        """One start of a run."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-u", "-m", "megatron_rl", "train", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARK: mark},
                cwd=REPO,
                start_new_session=True,
            )
        return Process(popen.pid, mark, log, lambda: str(popen.wait(timeout=END_S)))


class Process:
    """One start of a run, with a mark that all its processes have in their environment."""

    def __init__(self, pid: int, mark: str, log: Path, wait: Callable[[], str]) -> None:
        self.pid, self.mark, self.log, self._wait = pid, mark, log, wait

    def end(self) -> int:
        """Wait; its exit code."""
        return int(self._wait())

    def is_alive(self) -> bool:
        """Whether it still runs: one that has ended is a zombie until `end`."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait_for(self, text: str) -> bool:
        """Wait until the log has the text; False if the process ends before."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            alive = self.is_alive()
            if text in self.log.read_text(errors="replace"):
                return True
            if not alive:
                return False
            time.sleep(0.02)
        raise TimeoutError(f"never said {text!r}: {self.log.read_text()[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark."""
        marked = [psutil.Process(self.pid)] if self.is_alive() else []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = Path("/proc", str(process.pid), "environ").read_bytes().split(b"\0")
                if f"{MARK}={self.mark}".encode() in environment and process.pid != self.pid:
                    marked.append(process)
        return marked

    def kill_all(self) -> None:
        """Nothing of it is left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def kind_of(process: psutil.Process, driver: int) -> str:
    """What a process does for the run; "" for one whose death means nothing."""
    if process.pid == driver:
        return "driver"
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline())
        for name, kind in (
            ("raylet/raylet", "raylet"),
            ("gcs_server", "GCS"),
            ("ray::", "rank"),
            ("rewards", "reward process"),
            ("spawn_main", "reward process"),
        ):
            if name in words:
                return kind
    return ""


def killed_and_begun_again(starter: Warm | Cold, arguments: list[str], folder: Path, seed: str) -> Killed:
    """Kill a random process at a random moment, then start the same command until it ends by itself."""
    draw = random.Random(seed)
    step, delay = draw.randrange(STEPS), draw.random()
    text = "load data, start workers ..." if step == 0 else f"step_{step:06d}: "
    delay *= 6.0 if step == 0 else 1.0
    run = starter.start(arguments, folder / "start-1.log")
    try:
        run.wait_for(text)
        time.sleep(delay)
        by_kind: dict[str, list[psutil.Process]] = {}
        for process in run.processes():
            by_kind.setdefault(kind_of(process, run.pid), []).append(process)
        by_kind.pop("", None)
        kind = draw.choice(sorted(by_kind)) if by_kind else "nothing, for it had ended"
        killed = Killed(kind, f"{'before step 1' if step == 0 else f'after checkpoint {step}'} + {delay:.2f} s")
        if by_kind:
            os.kill(draw.choice(by_kind[kind]).pid, signal.SIGKILL)
        killed.codes.append(run.end())
    finally:
        run.kill_all()
    while killed.codes[-1] != 0 and len(killed.codes) < MOST_STARTS:
        again = starter.start(arguments, folder / f"start-{len(killed.codes) + 1}.log")
        try:
            killed.codes.append(again.end())
        finally:
            again.kill_all()
    return killed


def outcome(folder: Path) -> dict[str, Any]:
    """What a run has learned: rows without the machine's metrics, samples, bytes of the weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if not name.startswith(NOT_OF_THE_MODEL)} for row in rows]
    samples = folder / "rollouts.jsonl"
    weights = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("model.safetensors")}
    return {"rows": kept, "samples": samples.read_text() if samples.exists() else "", "weights": weights}


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two outcomes differ, in words; nothing if they are equal bit for bit."""
    found: list[str] = []
    steps = [[row["step"] for row in of["rows"]] for of in (one, other)]
    if steps[0] != steps[1]:
        return [f"steps {steps[0]} and {steps[1]}"]
    for mine, theirs in zip(one["rows"], other["rows"], strict=True):
        names = sorted(mine.keys() | theirs.keys())
        found += [
            f"step {mine['step']}: {name} {mine.get(name)} and {theirs.get(name)}"
            for name in names
            if mine.get(name) != theirs.get(name)
        ]
    found += ["samples"] if one["samples"] != other["samples"] else []
    names = sorted(one["weights"].keys() | other["weights"].keys())
    return found + [name for name in names if one["weights"].get(name) != other["weights"].get(name)]
