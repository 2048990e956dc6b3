from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.cluster.caches import FOLDERS, compile_caches
from megatron_rl.cluster.inline import InlineBackend
from megatron_rl.cluster.janitor import kept_clean
from megatron_rl.config.sections.cluster import ClusterConfig


def test_every_cache_is_below_one_folder_and_a_variable_that_is_set_goes_before() -> None:
    caches = compile_caches(None, {"XDG_CACHE_HOME": "/scratch/cache", "TRITON_CACHE_DIR": "/own"})
    assert caches == {
        name: f"/scratch/cache/megatron_rl/{below}" for name, below in FOLDERS.items() if name != "TRITON_CACHE_DIR"
    }
    home = Path.home()
    assert compile_caches(None, {})["VLLM_CACHE_ROOT"] == str(home / ".cache/megatron_rl/vllm")
    assert compile_caches("~/kept", {})["VLLM_CACHE_ROOT"] == str(home / "kept/vllm")
    assert compile_caches("kept", {}, "/run")["VLLM_CACHE_ROOT"] == "/run/kept/vllm"
    assert compile_caches("/kept", {}, "/run")["CUDA_CACHE_PATH"] == "/kept/cuda"


class Seen:
    def __init__(self, rank: int, world: int) -> None:
        self.environment = dict(os.environ)

    def look(self) -> dict[str, str]:
        return self.environment


def test_an_inline_rank_has_the_caches_outside_the_runs_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    with kept_clean():
        backend = InlineBackend(Seen, (), ClusterConfig(backend="inline", cache_dir=str(tmp_path / "kept")), "cpu")
        (answer,) = backend.call("look", [((), {})], [True], 60.0)
        backend.close(graceful=True)
    assert answer is not None
    assert {name: answer.value[name] for name in FOLDERS} == {
        name: str(tmp_path / "kept" / below) for name, below in FOLDERS.items()
    }
    assert not FOLDERS.keys() & os.environ.keys()
