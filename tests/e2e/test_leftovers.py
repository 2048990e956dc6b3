"""Nothing is left of a Ray run however it ends: killed, terminated and interrupted at ten moments each.

Processes count as the run's by a mark that the test puts into their environment, so that other runs on the machine do
not matter. The run's temporary files are in a folder of the test's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
MARK = "MEGATRON_RL_TEST_OF_LEFTOVERS"
GONE_S = 60.0
STEPS = 40
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
MOMENTS = {
    "reading data": ("load data", 0.2),
    "starting Ray": ("load data", 3.0),
    "starting ranks": ("load data", 7.0),
    "building models": ("load data", 11.0),
    "first validation": ("train:", 0.3),
    "first step": ("validation", 0.0),
    "second step": (f"step  1/{STEPS}", 0.05),
    "a save": ("global_step_4/actor", 0.0),
    "between steps": (f"step  6/{STEPS}", 0.1),
    "the last steps": (f"step {STEPS - 2}/{STEPS}", 0.0),
}
QUICK = {("KILL", "between steps"), ("TERM", "building models"), ("INT", "second step")}


def command(data: Path, runs: Path) -> list[str]:
    settings = [
        f"model.path={data / 'model'}",
        "model.init=random",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        "data.train_batch_size=8",
        "data.val_batch_size=200",
        "actor.ppo_mini_batch_size=8",
        "actor.optim.lr_warmup_steps=0",
        "rollout.name=fake",
        "rollout.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=5",
        f"trainer.default_local_dir={runs}",
        "trainer.experiment_name=a",
        "cluster.backend=ray",
        "cluster.num_cpus_per_rank=0.5",
    ]
    config = str(REPO / "configs" / "grpo-add2-1n1g.yaml")
    return [sys.executable, "-u", "-m", "megatron_rl", "train", config, *settings]


def marked(mark: str) -> dict[int, str]:
    """Processes with the mark in their environment: id -> command line."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if f"{MARK}={mark}".encode() in Path("/proc", str(process.pid), "environ").read_bytes().split(b"\0"):
                found[process.pid] = " ".join(process.cmdline())[:120]
    return found


def ports(pids: set[int]) -> set[int]:
    """TCP ports on which the processes listen."""
    found: set[int] = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids:
            found.add(getattr(connection.laddr, "port", 0))
    return found


def listening(wanted: set[int]) -> set[int]:
    """Those of the ports on which anything listens."""
    found = (getattr(one.laddr, "port", 0) for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return wanted & set(found)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Lines up to the one that holds the text."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    pytest.fail(f"never said {text!r}: {''.join(seen)[-3000:]}")


CASES = [
    pytest.param(name, moment, marks=() if (name, moment) in QUICK else pytest.mark.slow)
    for name in SIGNALS
    for moment in MOMENTS
]


@pytest.mark.parametrize("name, moment", CASES)
def test_nothing_is_left_of_a_run(data: Path, tmp_path: Path, name: str, moment: str):
    """Processes, ports, shared memory and temporary files are as they were; weights of whole steps are kept."""
    text, delay = MOMENTS[moment]
    temporary = Path("/tmp") / f"left-{os.getpid()}"
    temporary.mkdir()
    environment = os.environ | {MARK: str(tmp_path), "TMPDIR": str(temporary)}
    shared = set(os.listdir("/dev/shm"))
    run = subprocess.Popen(
        command(data, tmp_path / "runs"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=REPO,
        start_new_session=True,
    )
    try:
        wait_for(run, text)
        time.sleep(delay)
        processes = marked(str(tmp_path))
        its_ports = ports(set(processes))
        sent = time.monotonic()
        # As a terminal and a job manager do: to the whole group.
        os.kill(run.pid, SIGNALS[name]) if name == "KILL" else os.killpg(run.pid, SIGNALS[name])
        out, _ = run.communicate(timeout=GONE_S)
        # A process that ends loses its environment, by which it is known, before its sockets.
        while marked(str(tmp_path)) or any(temporary.iterdir()) or listening(its_ports):
            if time.monotonic() > sent + GONE_S:
                break
            time.sleep(0.2)
        seconds = time.monotonic() - sent
        left = marked(str(tmp_path))
        print(f"{name} {moment}: {len(processes)} processes, {len(its_ports)} ports; all gone after {seconds:.1f} s")
        assert left == {}, left
        assert list(temporary.iterdir()) == []
        assert listening(its_ports) == set()
        assert _left_in_shared_memory(shared) == set()
    finally:
        for pid in marked(str(tmp_path)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()
        subprocess.run(["rm", "-rf", str(temporary)], check=True)
    if name == "KILL":
        return
    goes_on = name == "TERM" and "its checkpoint is" in out
    assert run.returncode == (75 if goes_on else 128 + SIGNALS[name]), out
    assert "Traceback" not in out and f"stopped by SIG{name}" in out.splitlines()[-1]
    if "its weights are in" in out:
        saved = Path(out.split("its weights are in ")[1].splitlines()[0])
        assert (saved / "model.safetensors").is_file() and (saved / "config.json").is_file()
    else:
        assert not (tmp_path / "runs" / "a" / "config.yaml").exists()


def _left_in_shared_memory(before: set[str]) -> set[str]:
    """Files in /dev/shm that came and stay: other programs' semaphores last for moments, between two looks."""
    left = set(os.listdir("/dev/shm")) - before
    for _ in range(10):
        left -= _of_others()
        if not left:
            break
        time.sleep(0.3)
        left &= set(os.listdir("/dev/shm"))
    return left


def _of_others() -> set[str]:
    """Files in /dev/shm that processes hold which are not the test's."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found |= {Path(one.path).name for one in process.memory_maps() if one.path.startswith("/dev/shm/")}
            found |= {Path(one.path).name for one in process.open_files() if one.path.startswith("/dev/shm/")}
    return found
