"""launch/ray_cluster.sh and ray_node.sh without Ray: an interpreter stands in that answers their questions of Ray.

tests/e2e/test_two_nodes.py runs them with Ray on two nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"

# Answers for Ray: a head listens, a node lives until SIGTERM, or until a file tells it to leave.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *ray.scripts.scripts*) exec {python} {folder}/node.py "$@" ;;
  *megatron_rl.cluster.addresses*) echo 127.0.0.1 ;;
  *megatron_rl.cluster.readiness*)
    echo "[wait] asked for ${{*:3}}"
    if [ -e {folder}/incomplete ] && [ "$4" -gt 1 ]; then exit 1; fi
    [ ! -e {folder}/fails ] || exec sleep 100
    until [ "$(cat {folder}/starts | wc -l)" -ge "$4" ]; do sleep 0.1; done
    ;;
  *) exec {python} "$@" ;;
esac
"""
NODE = """
import os, signal, socket, sys, time
from pathlib import Path

folder, words = Path(__file__).parent, sys.argv[1:]
names = ("NCCL_X", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RL_GPUS", "TMPDIR")
with open(folder / "starts", "a") as starts:
    starts.write(repr((words, {name: os.environ.get(name) for name in names}, os.getcwd())) + "\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
if "--head" in words:
    server = socket.create_server(("127.0.0.1", int(words[words.index("--port") + 1])))
    if (folder / "fails").exists():
        sys.exit("no head today")
while not ("--address" in words and (folder / "leave").exists()):
    time.sleep(0.05)
(folder / "leave").unlink()
sys.exit(1)
"""
# As RL_SSH: the first argument is the host.
ENTER = """#!/usr/bin/env bash
host=$1
shift
exec env -i PATH="$PATH" HOME="$HOME" HOSTNAME="$host" STAND_IN={folder} "$@"
"""
WAITS = """
import os, signal, sys, time
def hear(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, hear)
print("runs", os.environ["RAY_ADDRESS"], repr(sys.argv[1:]), repr(os.environ.get("NCCL_X")), os.getcwd(), flush=True)
while True:
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Hosts:
    """A folder with the stand-ins."""

    folder: Path

    def start(self, *words: str, script: str = "ray_cluster.sh", **env: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RL_"))}
        own = {"RL_SSH": f"bash {self.folder}/enter", "PYTHON": f"{self.folder}/python", "STAND_IN": str(self.folder)}
        return subprocess.Popen(
            ["bash", str(LAUNCH / script), *words],
            cwd=self.folder,
            env={**kept, **own, "RL_LOG_DIR": str(self.folder / "logs"), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def starts(self) -> list[tuple[list[str], dict[str, str | None], str]]:
        """(options, environment, folder) of each start of a node."""
        file = self.folder / "starts"
        return [eval(line) for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self) -> list[str]:
        """Command lines of all that the scripts started."""
        lines: list[str] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("STAND_IN") == str(self.folder):
                    lines.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return lines


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    for name, text in (("python", PYTHON), ("node.py", NODE), ("enter", ENTER)):
        (tmp_path / name).write_text(text.format(python=sys.executable, folder=tmp_path) if name != "node.py" else text)
        (tmp_path / name).chmod(0o755)
    made = Hosts(tmp_path)
    yield made
    until(lambda: made.processes() == [], 20, lambda: f"left: {made.processes()}")


def until(condition: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.1)


def line_with(run: subprocess.Popen[str], word: str) -> str:
    assert run.stdout is not None
    seen: list[str] = []
    for line in iter(run.stdout.readline, ""):
        seen.append(line)
        if word in line:
            return line
    raise AssertionError("".join(seen))


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_words_environment_signals_and_the_exit_code_pass_through(hosts: Hosts) -> None:
    odd = "a b\n'c' $HOME"
    words = ("a", "b", "--", sys.executable, "-c", WAITS, odd, "")
    run = hosts.start(*words, NCCL_X=odd, RL_GPUS="8", CUDA_VISIBLE_DEVICES="1")
    assert " 2 16 600" in line_with(run, "[wait] asked for")
    line = line_with(run, "runs")
    assert f"{[odd, '']!r} {odd!r} {hosts.folder}\n" in line and line.startswith("runs 127.0.0.1:")
    run.send_signal(signal.SIGUSR1)
    line_with(run, "heard SIGUSR1")
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 75 and "heard SIGTERM" in out
    (head, head_env, folder), (worker, worker_env, _) = hosts.starts()
    address = f"127.0.0.1:{option(head, '--port')}"
    assert "--head" in head and option(worker, "--address") == address and folder == str(hosts.folder)
    assert head_env["NCCL_X"] == worker_env["NCCL_X"] == odd and option(head, "--num-gpus") == "8"
    # A secret of this job, the same on all hosts; ports and temporary folders of each node's own.
    assert head_env["RAY_AUTH_MODE"] == "token" and len(head_env["RAY_AUTH_TOKEN"] or "") == 64
    assert head_env["RAY_AUTH_TOKEN"] == worker_env["RAY_AUTH_TOKEN"] and head_env["TMPDIR"] != worker_env["TMPDIR"]
    blocks = [int(option(node, "--min-worker-port")) // 500 for node in (head, worker)]
    assert blocks[0] != blocks[1]
    assert not any(Path(str(env["TMPDIR"])).exists() for env in (head_env, worker_env)), "temporary folders are gone"
    assert not any(
        Path(f"/tmp/.rl-ports-{int(option(node, '--node-manager-port')) - 1}").exists() for node in (head, worker)
    )


def test_a_worker_that_loses_the_head_joins_again(hosts: Hosts) -> None:
    run = hosts.start("a", "b", "--", sys.executable, "-c", WAITS)
    line_with(run, "runs")
    until(lambda: len(hosts.starts()) == 2, 20, lambda: str(hosts.starts()))
    (hosts.folder / "leave").touch()
    until(lambda: len(hosts.starts()) == 3, 20, lambda: str(hosts.starts()))
    run.terminate()
    run.communicate(timeout=30)
    (_, first, _), (_, second, _) = hosts.starts()[1:]
    assert first["TMPDIR"] == second["TMPDIR"]
    assert "the node left the cluster (code 1)" in (hosts.folder / "logs" / "01-b.log").read_text()


def test_nothing_outlives_a_script_that_is_killed(hosts: Hosts) -> None:
    run = hosts.start("a", "b", "--", sys.executable, "-c", WAITS)
    line_with(run, "runs")
    until(lambda: len(hosts.starts()) == 2, 20, lambda: str(hosts.starts()))
    folders = [Path(str(env["TMPDIR"])) for _, env, _ in hosts.starts()]
    run.kill()
    run.communicate(timeout=30)
    until(lambda: not any(folder.exists() for folder in folders), 20, lambda: str(folders))


def test_a_head_that_does_not_start_and_hosts_that_do_not_come(hosts: Hosts) -> None:
    (hosts.folder / "fails").touch()
    run = hosts.start("a", "--", "true")
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 2 and "the head on a has ended" in out and "no head today" in out
    (hosts.folder / "fails").unlink()
    (hosts.folder / "incomplete").touch()
    run = hosts.start("a", "b", "--", "echo", "ran")
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and "asked for" in out and "ran" not in out.split(), "the command needs all hosts"


def test_one_machine_needs_no_ssh_and_wrong_words_are_explained(hosts: Hosts) -> None:
    out, _ = (run := hosts.start("sh", "-c", "echo here; exit 3", script="local.sh", RL_SSH="false")).communicate(
        timeout=30
    )
    assert run.returncode == 3 and "here\n" in out
    for script, words in (("local.sh", ()), ("ray_cluster.sh", ("a", "--")), ("ray_cluster.sh", ("--", "true"))):
        run = hosts.start(*words, script=script)
        out, _ = run.communicate(timeout=30)
        assert run.returncode == 2 and f"bash launch/{script} " in out
    run = hosts.start("no-such-verb", script="ray_node.sh")
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 2 and "bash launch/ray_node.sh head" in out
