"""Checks of the environment: home and temporary folders, socket paths, the open-file limit, logger log-ins.

Each fault is named by the variable or limit that is wrong; nothing is started or sent to find out.
"""

from __future__ import annotations

import json
import netrc
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.cluster.addresses import ray_address
from megatron_rl.errors import Fault

if TYPE_CHECKING:
    from megatron_rl.config.run import RunConfig

LONGEST_SOCKET = 107
"""Bytes that Linux allows in the path of a Unix socket."""
RAY_SOCKET = "/rl-01234567/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Ray's longest socket below its temporary folder; process ids have at most seven digits."""
LEAST_OPEN_FILES = 1024
OPEN_FILES_OF_A_RANK = 128
"""Weight files, sockets to the other ranks and to Ray, pipes: what a rank was seen to hold open is below 100."""


def surroundings_faults(cfg: RunConfig, environ: Mapping[str, str] = os.environ) -> list[Fault]:
    """Every fault of the environment that would end the run later."""
    faults = temporary_faults(environ) + home_faults(environ) + login_faults(cfg.trainer.logger, environ)
    address = ray_address(cfg.cluster, environ)
    if address is not None:
        faults += address_faults(address, cfg.cluster.ray_address)
        faults += job_faults(cfg.trainer.default_local_dir, environ)
    elif cfg.cluster.backend == "ray":
        faults += socket_faults(environ) + open_file_faults(cfg.cluster.n_gpus_per_node)
    return faults


def address_faults(address: str, key: str | None) -> list[Fault]:
    """An address of Ray's dashboard or of its client server where that of the head is needed."""
    if "://" not in address:
        return []
    name = "RAY_ADDRESS" if key is None else "cluster.ray_address"
    reason = "is no address of a Ray head, which has the form host:port"
    cure = "write the address that `ray start --head` printed" + (", or unset RAY_ADDRESS" if key is None else "")
    return [Fault(name, address, reason, cure)]


def in_copied_folder(environ: Mapping[str, str]) -> bool:
    """Whether this process is a job of `ray job submit --working-dir`: every node has its own copy of the folder."""
    job = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return bool(job.get("runtime_env", {}).get("working_dir"))


def job_faults(run_parent: str, environ: Mapping[str, str]) -> list[Fault]:
    """A run folder that is in the copy that Ray makes of a job's working folder: it would be gone with the job."""
    if os.path.isabs(run_parent) or not in_copied_folder(environ):
        return []
    reason = "is in a copy of the working folder, which Ray deletes after the job and other nodes do not see"
    return [Fault("trainer.default_local_dir", run_parent, reason, "write a path from the root, on a shared disk")]


def temporary_faults(environ: Mapping[str, str]) -> list[Fault]:
    """A temporary folder that is named but cannot be used: Python would silently take another one."""
    faults: list[Fault] = []
    for name in ("TMPDIR", "RAY_TMPDIR"):
        folder = environ.get(name)
        if folder is None:
            continue
        if not folder or not Path(folder).is_dir():
            faults.append(Fault(name, folder, "there is no such folder", f"make it (mkdir -p), or unset {name}"))
        elif not os.access(folder, os.W_OK | os.X_OK):
            faults.append(Fault(name, folder, "cannot be written", f"name a folder that can be, or unset {name}"))
    return faults


def home_faults(environ: Mapping[str, str]) -> list[Fault]:
    """A home folder that Ray (its token) or vLLM (its cache) cannot write to."""
    home = environ.get("HOME", os.path.expanduser("~"))
    if not os.path.isabs(home):
        return [Fault("HOME", home, "is not a path from the root", "export HOME=/path/to/a/folder/of/yours")]
    place = Path(home)
    while not place.exists():
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return []
    what = "cannot be written" if place.is_dir() else "is a file"
    reason = f"{place} {what}, and Ray and vLLM keep files in the home folder"
    return [Fault("HOME", home, reason, "export HOME=/path/to/a/folder/that/you/may/write")]


def socket_faults(environ: Mapping[str, str]) -> list[Fault]:
    """A temporary folder so deep that Ray's sockets below it would have paths longer than the system allows."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in environ), "TMPDIR")
    folder = environ.get(name, "/tmp")
    length, most = len(os.fsencode(folder.rstrip("/"))), LONGEST_SOCKET - len(RAY_SOCKET)
    if length <= most:
        return []
    reason = (
        f"has {length} bytes, and Ray's sockets below it leave room for {most} (Linux allows {LONGEST_SOCKET} in all)"
    )
    return [Fault(name, folder, reason, "export RAY_TMPDIR=/tmp, or another short path")]


def open_file_faults(ranks: int) -> list[Fault]:
    """A limit of open files that the ranks of this machine would reach; Ray raises the soft one to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = least_open_files(ranks)
    if hard == resource.RLIM_INFINITY or hard >= need:
        return []
    reason = f"this shell may open {hard} files at once, and {ranks} ranks with Ray need about {need}"
    return [Fault("ulimit -n", hard, reason, f"ulimit -Hn {need} (as root, or in limits.conf), or fewer ranks a node")]


def least_open_files(ranks: int) -> int:
    """What the hard limit must be on a node of so many ranks."""
    return max(LEAST_OPEN_FILES, ranks * OPEN_FILES_OF_A_RANK)


def login_faults(loggers: Sequence[str], environ: Mapping[str, str]) -> list[Fault]:
    """Loggers that would ask for a log-in on the terminal when the run starts."""
    if "wandb" not in loggers or environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return []
    if environ.get("WANDB_API_KEY") or _in_netrc(environ):
        return []
    cure = "run `wandb login`, export WANDB_API_KEY, or export WANDB_MODE=offline"
    return [Fault("trainer.logger", "wandb", "Weights & Biases has no log-in here and would ask for one", cure)]


def _in_netrc(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` has left its key in the netrc file (WANDB_BASE_URL's host, or the service's own)."""
    host = environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0].split(":")[0]
    home = environ.get("HOME", os.path.expanduser("~"))
    for name in (environ.get("NETRC"), f"{home}/.netrc", f"{home}/_netrc"):
        if name and Path(name).is_file():
            try:
                return netrc.netrc(name).authenticators(host) is not None
            except (netrc.NetrcParseError, OSError):
                return False
    return False
