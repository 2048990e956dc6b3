"""Where tests of engines are among the selected ones, the server that ranks are forked from loads vLLM once: each rank
would take nine seconds for it.
"""

from __future__ import annotations

import pytest

from tests.helpers import run_ranks
from tests.helpers.stack import HAS_CPU_ENGINE

ENGINE = [
    "vllm",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
]


def pytest_collection_finish(session: pytest.Session) -> None:
    if HAS_CPU_ENGINE and any("test_vllm_" in item.nodeid for item in session.items):
        run_ranks.PRELOAD.extend(ENGINE)
