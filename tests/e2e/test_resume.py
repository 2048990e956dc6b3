"""Whole runs that go on: on another layout, after a signal, and from a checkpoint whose bytes have changed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.runs import verbs
from tests.helpers.killing import STEPS, Cold, Warm, outcome, settings, unlike
from tests.helpers.stack import needs_cpu_engine

INLINE = "cluster.backend=inline"
HALF = STEPS // 2
LAYOUTS = {"dp2": [], "tp2": ["actor.tp=2"]}


def command(data: Path, runs: Path, algorithm: str, *more: str) -> list[str]:
    # A learning rate that decays to the end of the run would differ in a run of half the steps.
    own = ["model.dtype=float32", "trainer.experiment_name=run", "actor.optim.lr_scheduler=constant"]
    return settings(data, runs, algorithm, *own, *more)


def trained(starter: Warm | Cold, arguments: list[str], log: Path, code: int = 0) -> str:
    """Train to the end; what was printed."""
    run = starter.start(arguments, log)
    try:
        assert run.end() == code, log.read_text()[-3000:]
    finally:
        run.kill_all()
    return log.read_text()


@pytest.fixture(scope="module")
def whole(data: Path, warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What an unbroken run of SFT made on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    trained(warm, command(data, folder, "sft", INLINE), folder / "log")
    return outcome(folder / "run")


CASES = [("sft", "tp2"), ("sft", "dp2"), ("grpo", "dp2"), ("ppo", "tp2")]


@pytest.mark.parametrize(
    ("algorithm", "layout"), [pytest.param(*case, marks=pytest.mark.slow if i else ()) for i, case in enumerate(CASES)]
)
def test_r1_a_run_goes_on_on_another_layout(
    data: Path, tmp_path: Path, warm: Warm, whole: dict[str, Any], algorithm: str, layout: str
) -> None:
    """The first half on one rank, the second on two: equal to 5 digits, and the first half bit for bit."""
    if algorithm != "sft":
        trained(
            warm,
            command(data, tmp_path, algorithm, INLINE, "trainer.default_local_dir=" + str(tmp_path / "w")),
            tmp_path / "l",
        )
        whole = outcome(tmp_path / "w" / "run")
    half = f"trainer.total_training_steps={HALF}"
    trained(warm, command(data, tmp_path, algorithm, INLINE, half), tmp_path / "first.log")
    two = [*LAYOUTS[layout], "cluster.n_gpus_per_node=2"]
    said = trained(Cold(), command(data, tmp_path, algorithm, *two), tmp_path / "second.log")
    assert f"going on after step {HALF}" in said and "cluster.n_gpus_per_node was 1 and is 2" in said
    rows, expected = outcome(tmp_path / "run")["rows"], whole["rows"]
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    names = [name for name in expected[-1] if name.endswith(("loss", "grad_norm", "/lr", "mean", "coef"))]
    assert len(names) > 2
    for mine, theirs in zip(rows, expected, strict=True):
        rel = 0.0 if mine["step"] < HALF else 1e-5
        for name in names:
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=rel, abs=rel), (mine["step"], name)


def test_a_signal_to_a_whole_run_saves_and_its_command_goes_on(
    data: Path, tmp_path: Path, warm: Warm, whole: dict[str, Any]
) -> None:
    """Exit code 75, then the same command: what comes out equals the unbroken run."""
    arguments = command(data, tmp_path, "sft", INLINE)
    run = warm.start(arguments, tmp_path / "first.log")
    try:
        assert run.wait_for("step_000001: ")
        os.kill(run.pid, signal.SIGUSR1)
        code = run.end()
    finally:
        run.kill_all()
    said = (tmp_path / "first.log").read_text()
    assert code == 75 and "stopped by SIGUSR1 after step" in said and "Traceback" not in said, said
    step = int(said.split("stopped by SIGUSR1 after step ")[1].split(":")[0])
    assert f"going on after step {step}, from" in trained(warm, arguments, tmp_path / "second.log")
    found = outcome(tmp_path / "run")
    found["weights"] = {name: found["weights"][name] for name in whole["weights"]}
    assert unlike(whole, found) == []


def test_a_flipped_byte_is_found_by_the_ranks_and_the_checkpoint_before_it_is_taken(
    data: Path, tmp_path: Path, warm: Warm, whole: dict[str, Any]
) -> None:
    half = f"trainer.total_training_steps={HALF}"
    trained(warm, command(data, tmp_path, "sft", INLINE, half), tmp_path / "first.log")
    last = tmp_path / "run" / "checkpoints" / f"step_{HALF:06d}"
    (file,) = (last / "actor").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = trained(warm, command(data, tmp_path, "sft", INLINE), tmp_path / "second.log")
    assert f"passed over a broken checkpoint: {file}: its bytes are not those" in said
    assert f"going on after step {HALF - 1}" in said
    assert unlike(whole, outcome(tmp_path / "run")) == []


def test_a_checkpoints_model_is_exported(data: Path, tmp_path: Path, warm: Warm) -> None:
    """In Hugging Face form, equal to the save of the same step."""
    from safetensors.torch import load_file

    arguments = command(data, tmp_path, "sft", INLINE, f"trainer.total_training_steps={HALF}")
    trained(warm, arguments, tmp_path / "log")
    cfg, out = load_config(arguments[:1], arguments[1:]), tmp_path / "out"
    verbs.export(cfg, str(out), checkpoint=str(tmp_path / "run"))
    one, two = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run" / "final", out))
    assert one.keys() == two.keys() and all(bool((one[name] == two[name]).all()) for name in one)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(record["starts"]) == 1 and record["starts"][0]["command"] == record["command"]


@needs_cpu_engine
@pytest.mark.slow
def test_engines_get_the_restored_weights_under_the_version_that_they_had(data: Path, tmp_path: Path) -> None:
    """GRPO with vLLM through Ray: engine and trainer agree in the first step after the resume, and later."""
    vllm = ["rollout.name=vllm", "rollout.kv_cache_gb=0.06", f"trainer.total_training_steps={HALF + 1}"]
    for part in ("whole", "parts"):
        (tmp_path / part).mkdir()
    trained(Cold(), command(data, tmp_path / "whole", "grpo", *vllm), tmp_path / "whole.log")
    half = [*vllm, f"trainer.total_training_steps={HALF - 1}"]
    trained(Cold(), command(data, tmp_path / "parts", "grpo", *half), tmp_path / "first.log")
    trained(Cold(), command(data, tmp_path / "parts", "grpo", *vllm), tmp_path / "second.log")
    whole, parts = (outcome(tmp_path / part / "run") for part in ("whole", "parts"))
    assert [row["step"] for row in parts["rows"]] == list(range(HALF + 2))
    assert all(row["mismatch/abs_max"] < 1e-4 for row in parts["rows"] if row["step"])
    whole["weights"] = {name: whole["weights"][name] for name in parts["weights"] if name in whole["weights"]}
    parts["weights"] = {name: parts["weights"][name] for name in whole["weights"]}
    assert unlike(whole, parts) == []
