"""An engine by the path of its class: what is known of it, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from megatron_rl.config.checks.engine import engine_path
from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.engines import ENGINES, engine_of
from megatron_rl.errors import RolloutError
from megatron_rl.rollout.engine import EngineSettings, make_engine
from tests.helpers.config import faults, load, only_fault

ENGINE = """
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.fake import FakeEngine

answer = 42


class Whole(FakeEngine): ...


class Deaf:
    part, shared, weight_version = None, frozenset(), -1

    def __init__(self, settings): ...

    def generate(self, requests, sampling): ...


class Base(RolloutEngine):
    def generate(self, requests, sampling): ...


class NoVersion:
    def __init__(self, settings):
        self.part = None

    generate = update_weights = parameters = shapes = begin_update = end_update = lambda *_: None
    reset_prefix_cache = sleep = wake = close = hold = lambda *_: None
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `byp` whose __init__ ends the process, a namespace package `nsp`, and a module `engine_file`."""
    inner = tmp_path / "path" / "byp" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise SystemExit('imported')\n")
    (inner / "__init__.py").write_text("")
    (inner / "engine.py").write_text(ENGINE)
    spaced = tmp_path / "path" / "nsp" / "deep" / "deeper"
    spaced.mkdir(parents=True)
    (spaced / "engine.py").write_text(ENGINE)
    (tmp_path / "path" / "engine_file.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["byp.inner.engine:Whole", "nsp.deep.deeper.engine:Whole", "engine_file:Whole", "byp.inner:Whole"]
)
def test_a_path_that_is_found_passes_and_imports_nothing(package: Path, name: str) -> None:
    cfg = load(package, f"rollout.name={name}")
    assert engine_path(cfg) == [] and "byp" not in sys.modules and "engine_file" not in sys.modules
    assert cfg.engine == engine_of(name) and cfg.engine.name == cfg.engine.implementation == name


@pytest.mark.parametrize(
    ("name", "reason", "cure"),
    [
        ("byq:Whole", "there is no module byq", "put its folder on PYTHONPATH"),
        ("byp.outer.engine:Whole", "there is no module byp.outer", "correct the path"),
        ("byp.inner.engines:Whole", "there is no module byp.inner.engines", "correct the path"),
        ("nsp.deep.deeper.engines:Whole", "there is no module nsp.deep.deeper.engines", "correct the path"),
        ("engine_file.inner:Whole", "there is no module engine_file.inner", "correct the path"),
        ("__main__:Whole", "there is no module __main__", "correct the path"),
        ("'engine_file:'", "is no path of a class", "write package.module:Class, or use fake, hf, vllm"),
        (":Whole", "is no path of a class", "write package.module:Class"),
        ("byp..inner:Whole", "is no path of a class", "write package.module:Class"),
        ("path/engine_file.py:Whole", "is no path of a class", "write package.module:Class"),
        ("engine_file:Whole:Whole", "is no path of a class", "write package.module:Class"),
        ("engine_file.Whole", "is none of the choices", "choices: fake, hf, vllm, package.module:Class"),
        ("vlm", "is none of the choices", "did you mean vllm?"),
    ],
)
def test_a_wrong_path_is_refused_by_the_check(package: Path, name: str, reason: str, cure: str) -> None:
    fault = only_fault(package, f"rollout.name={name}")
    assert (fault.key, fault.value) == ("rollout.name", name.strip("'"))
    assert fault.reason.startswith(reason) and cure in fault.cure, fault
    assert "byp" not in sys.modules


def test_nothing_is_supposed_of_an_engine_by_path(package: Path) -> None:
    two_ranks = ("rollout.tp=2", "cluster.n_gpus_per_node=2", "rollout.engine_kwargs.block_size=32")
    found = faults(package, "rollout.name=engine_file:Whole", *two_ranks)
    assert [fault.key for fault in found] == ["rollout.tp", "rollout.engine_kwargs"]
    engine = engine_of("engine_file:Whole")
    can = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    for name in ("multi_rank", "shares_weights", "stop_texts", "settings", "refuse_keyword", "package"):
        assert not can[name], name
    assert engine.runs_model and engine.takes_whole_tensors


def test_settings_that_an_engine_by_path_does_not_read_are_told(package: Path) -> None:
    cfg = load(package, "rollout.name=engine_file:Whole", "rollout.weight_sync=full", "rollout.max_num_seqs=3")
    idle = {setting.key: setting.why for setting in idle_settings(cfg)}
    assert idle["rollout.weight_sync"] == "the engine engine_file:Whole takes whole tensors"
    assert idle["rollout.max_num_seqs"] == "the engine engine_file:Whole does not read it"


def settings(name: str) -> EngineSettings:
    return EngineSettings(
        name=name, model_path="", tokenizer_path="", vocab_size=8, max_model_len=8, dtype="float32", device="cpu",
        gpu_memory_utilization=0.5, kv_cache_gb=None, max_num_seqs=1, max_num_batched_tokens=None, enforce_eager=True,
        free_cache_engine=False, seed=0, needs_text=False,
    )  # fmt: skip


def test_a_class_with_all_methods_is_built(package: Path) -> None:
    assert make_engine(settings("engine_file:Whole")).weight_version == -1


UNWRITTEN = "begin_update, close, end_update, hold, parameters, reset_prefix_cache, shapes, sleep, update_weights, wake"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("engine_file:Deaf", f"its class lacks {UNWRITTEN}"),
        ("engine_file:Base", f"its class lacks {UNWRITTEN}"),
        ("engine_file:NoVersion", "its class lacks shared, weight_version"),
        ("engine_file:Whol", "engine_file has no class Whol"),
        ("engine_file:answer", "engine_file has no class answer"),
        ("byq.engine:Whole", "there is no module byq"),
        ("vlm", "there is no such engine"),
    ],
)
def test_a_class_that_is_no_engine_is_refused_before_it_generates(package: Path, name: str, reason: str) -> None:
    with pytest.raises(RolloutError, match=r"rollout\.name") as refused:
        make_engine(settings(name))
    assert f"{name!r} -- {reason} -- " in str(refused.value)


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_shipped_name_is_its_record(name: str) -> None:
    assert engine_of(name) is ENGINES[name]
