"""Where compiled kernels and graphs are kept between runs: one folder for all that compiles on a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable that names a library's cache -> folder in the cache of a run. vLLM's holds its compiled graphs, the kernels
in them, and what it has found out about models."""


def compile_caches(cache_dir: str | None, environ: Mapping[str, str], folder: str | None = None) -> dict[str, str]:
    """The variables of FOLDERS that have no value in `environ`, of a rank on this node. They must be set before the
    libraries are imported.

    cache_dir: cluster.cache_dir. folder: what a relative one is taken from; None: the working folder.
    """
    # Temporary files would be gone with the run, and what is in the cache is for later runs.
    root = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "megatron_rl") if cache_dir is None else Path(cache_dir)
    root = Path(folder or os.getcwd(), root.expanduser())
    return {name: str(root / below) for name, below in FOLDERS.items() if name not in environ}
