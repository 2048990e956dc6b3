"""Credit by the built kernels and by the torch code, by name; the kernels are built if there is a compiler."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

from megatron_rl.algos.scan import TORCH, CreditKernels
from megatron_rl.ops import advantages

ROOT = advantages.PACKAGE.parent
BACKENDS = ("built", "torch")


def require_kernels() -> ModuleType:
    """megatron_rl.ops.advantages with built kernels: builds them where launch/install.sh has not."""
    if not advantages.built_for():
        if shutil.which("c++") is None:
            pytest.skip("the kernels are not built, and there is no compiler")
        with (ROOT / "setup.py").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not advantages.libraries():
                command = [sys.executable, "setup.py", "build_ext", "--inplace"]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
                assert advantages.libraries(), done.stdout + done.stderr
        advantages.built_for.cache_clear()
    assert "cpu" in advantages.built_for()
    return advantages


def kernels_of(backend: str) -> CreditKernels:
    """By a name of BACKENDS."""
    return TORCH if backend == "torch" else require_kernels().KERNELS
