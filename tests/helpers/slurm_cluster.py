"""A Slurm cluster of two nodes on this machine: each node is a network namespace with its own address and name.

Needs root, iproute2, and the programs of Debian's packages slurmctld, slurmd, slurm-client and munge. The daemons run
as children of the test, with configuration, sockets and state in a temporary folder; the machine stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "unshare")
NODES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
SEARCHED = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

CONFIG = """
ClusterName=two
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,sched_min_interval=0
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=n1 NodeAddr=10.77.0.1 CPUs={cpus}
NodeName=n2 NodeAddr=10.77.0.2 CPUs={cpus}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# A node has a name and a table of names of its own, beside its network.
ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def why_not() -> str | None:
    """What this machine lacks for such a cluster, in words; None if it can have one."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


@dataclass
class SlurmCluster:
    """folder: configuration, logs and state."""

    folder: Path
    namespaces: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def command(self, node: str, *words: str) -> list[str]:
        """What runs `words` on a node."""
        entered = ["unshare", "--uts", "--mount", "sh", "-ec", ENTER, "sh", node, str(self.folder / "hosts"), *words]
        return ["ip", "netns", "exec", self.namespaces[node], *entered]

    def environment(self, own: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = ("HOME", "LANG", "TMPDIR")
        base = {name: os.environ[name] for name in kept if name in os.environ}
        return {**base, "PATH": SEARCHED, "SLURM_CONF": str(self.folder / "slurm.conf"), **(own or {})}

    def run(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Standard output of a program of Slurm on the first node."""
        done = subprocess.run(
            self.command("n1", *words), cwd=cwd, env=self.environment(env), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def sbatch(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """The number of a job on both nodes. words: further options, then script and arguments."""
        options = ("--parsable", "--nodes=2", "--gpus-per-node=0", f"--cpus-per-task={os.cpu_count()}")
        return self.run("sbatch", *options, *words, cwd=cwd, env=env)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, states: tuple[str, ...], timeout_s: float) -> dict[str, str]:
        """The job once it is in one of the states; AssertionError with the daemon's last lines after timeout_s."""
        until = time.monotonic() + timeout_s
        while True:
            job = self.job(number)
            if job["JobState"] in states:
                return job
            assert time.monotonic() < until, f"job {number} is {job['JobState']} after {timeout_s} s\n{self._words()}"
            time.sleep(1.0)

    def start(self) -> None:
        folder = self.folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        (folder / "hosts").write_text("".join(f"{ip} {node}\n" for node, ip in NODES.items()) + "127.0.0.1 localhost\n")
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, cpus=os.cpu_count()))
        version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/{version}\n")
        self._connect()
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self._daemon(["munged", "--foreground", "--force", *munge])
        _until((folder / "munge.sock").exists, 10, "munged does not start")
        self._daemon(self.command("n1", "slurmctld", "-D", "-c"))
        for node in NODES:
            self._daemon(self.command(node, "slurmd", "-D", "-N", node))
        _until(self._is_ready, 60, f"the nodes do not come up\n{self._words()}")

    def stop(self) -> None:
        """End the daemons and what is left on the nodes, and take the namespaces away."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=20)
        for name in self.namespaces.values():
            for pid in _output("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _output("ip", "netns", "delete", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[str]:
        """Command lines of what runs on the nodes, Slurm's own daemons apart."""
        pids = [pid for name in self.namespaces.values() for pid in _output("ip", "netns", "pids", name).split()]
        lines: list[str] = []
        for pid in pids:
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return [line for line in lines if line and not line.startswith(("slurmctld ", "slurmd ", ": slurmscriptd"))]

    def _connect(self) -> None:
        (first, second), addresses = self.namespaces.values(), list(NODES.values())
        for name in (first, second):
            _output("ip", "netns", "add", name)
        _output("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip((first, second), addresses, strict=True):
            _output("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _output("ip", "-n", name, "link", "set", "eth0", "up")
            _output("ip", "-n", name, "link", "set", "lo", "up")

    def _daemon(self, words: list[str]) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(words, env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _is_ready(self) -> bool:
        done = subprocess.run(
            self.command("n1", "sinfo", "--noheader", "--format=%T %D"),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip() == f"idle {len(NODES)}"

    def _words(self) -> str:
        return "\n".join(
            f"{path.name}: {line}"
            for path in sorted(self.folder.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()[-8:]
        )


@contextlib.contextmanager
def two_nodes() -> Iterator[SlurmCluster]:
    """A cluster that runs for the block."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = SlurmCluster(folder, {node: f"slurm-{os.getpid()}-{node}" for node in NODES})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _output(*words: str) -> str:
    return subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=30, env={**os.environ, "PATH": SEARCHED}
    ).stdout


def _until(condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.2)
