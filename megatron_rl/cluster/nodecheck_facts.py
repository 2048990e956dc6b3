"""The facts of the node that this process runs on, for nodecheck.py. Imports no torch; changes nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.cluster.nodecheck import GpuFacts, NodeHealth
from megatron_rl.observe.versions import versions

SMI_S = 30.0
"""A healthy nvidia-smi answers in a second or two; that of a sick GPU hangs."""
SLOWDOWNS = {
    "clocks_throttle_reasons.hw_thermal_slowdown": "heat",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "the power brake",
    "clocks_throttle_reasons.sw_thermal_slowdown": "heat (driver)",
}
QUERY = ("index", "name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", *SLOWDOWNS)
ROWS_QUERY = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")


def collect(folders: Sequence[str], token_file: str | None, with_gpus: bool, is_alone: bool = False) -> NodeHealth:
    """The facts of this node.

    folders: paths whose contents are compared. token_file: a file to read. is_alone: there is no other node, so
    versions are not asked for.
    """
    temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    gpus, trouble = _gpus() if with_gpus else ((), "")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeHealth(
        host=platform.node(),
        versions={} if is_alone else versions() | {"code": code_digest()},
        cpus=len(os.sched_getaffinity(0)),
        memory_free=_memory_free(),
        temporary=temporary,
        temporary_free=shutil.disk_usage(temporary).free,
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        gpus=gpus,
        gpu_trouble=trouble,
        folders={path: digest(Path(path)) for path in folders},
        token=None if token_file is None else _text(Path(token_file)),
    )


def digest(path: Path) -> str | None:
    """Of the names and sizes of the files in a folder, or of a file's size; None where there is nothing."""
    try:
        if not path.is_dir():
            return str(path.stat().st_size)
        entries = sorted((entry.name, entry.stat().st_size) for entry in path.iterdir() if entry.is_file())
    except OSError:
        return None
    return _short("\n".join(f"{name} {size}" for name, size in entries).encode())


def code_digest() -> str:
    """Of this package's source files."""
    root = Path(__file__).resolve().parents[1]
    whole = hashlib.sha1(usedforsecurity=False)
    for file in sorted(root.rglob("*.py")):
        whole.update(str(file.relative_to(root)).encode())
        whole.update(file.read_bytes())
    return whole.hexdigest()[:12]


def read_gpus(text: str, rows_text: str) -> tuple[GpuFacts, ...]:
    """The GPUs in the CSV answers of nvidia-smi to QUERY and ROWS_QUERY (one line a GPU, in the same order).

    Raises ValueError where a line does not have the columns that were asked for.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in rows_text.splitlines() if line.strip()]
    gpus: list[GpuFacts] = []
    for at, line in enumerate(line for line in text.splitlines() if line.strip()):
        index, name, total, used, ecc, *reasons = (cell.strip() for cell in line.split(","))
        slow = [text for text, cell in zip(SLOWDOWNS.values(), reasons, strict=True) if cell == "Active"]
        states = rows[at][1:] if at < len(rows) else []
        bad_rows = any(cell.lower() in ("yes", "1") for cell in states)
        errors = int(ecc) if ecc.isdigit() else None
        gpus.append(GpuFacts(int(index), name, int(total) << 20, int(used) << 20, errors, tuple(slow), bad_rows))
    return tuple(gpus)


def _gpus() -> tuple[tuple[GpuFacts, ...] | None, str]:
    """(GPUs of this node; None without nvidia-smi, why they could not be asked for)."""
    if shutil.which("nvidia-smi") is None:
        return None, ""
    try:
        text = _smi(f"--query-gpu={','.join(QUERY)}")
        # GPUs before Ampere remap no rows: an error of this question is no fault.
        rows = _smi(f"--query-remapped-rows={','.join(ROWS_QUERY)}", may_fail=True)
        return read_gpus(text, rows), ""
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi does not answer within {SMI_S:g} s"
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (error.stdout or error.stderr or "").strip() if isinstance(error, subprocess.CalledProcessError) else ""
        return (), f"nvidia-smi fails: {lines or error}"
    except ValueError as error:
        return (), f"nvidia-smi's answer is not understood: {error}"


def _smi(question: str, may_fail: bool = False) -> str:
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=not may_fail).stdout


def _memory_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def _short(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()[:12]
