"""Where tests of engines are among the selected ones, the server that ranks are forked from loads vLLM once: each rank
would take nine seconds for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.quickstart.make_data import make
from tests.helpers import run_ranks
from tests.helpers.killing import Warm
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model and data. What the runs of a module write lies beside them."""
    folder = tmp_path_factory.mktemp("quickstart") / "data"
    make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Starts runs from a process that has imported what they need."""
    server = Warm()
    yield server
    server.close()
