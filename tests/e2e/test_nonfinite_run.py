"""Whole SFT runs in which one row breaks the gradient, and others in which the model itself is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.data import model_folder, write_jsonl

REPO = Path(__file__).resolve().parents[2]
ALL = """import sys, json
from megatron_rl.cli import main
print('CODES', [main(run) for run in json.loads(sys.argv[1])])
"""
"""Runs one after the other in one process, since most of a short run's time is imports."""


def _model(folder: Path, token: str, value: float) -> Path:
    """The quick start's model with weights; `value` stands in the embedding of `token`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_folder(folder)
    torch.manual_seed(0)
    # Tied, the number would stand in the output matrix too, and break every row.
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config).float()
    number = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][token]
    with torch.no_grad():
        model.get_input_embeddings().weight[number] = value
    model.save_pretrained(folder)
    return folder


def _final(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit codes, and what was said; the runs are in root/NAME."""
    root = tmp_path_factory.mktemp("nonfinite")
    huge, nan = _model(root / "huge", "8", 3e38), _model(root / "nan", "8", float("nan"))
    # The 8 stands in row 8 alone: of the two mini-batches of a pass over the data, the second is broken.
    numbers = (0, 1, 2, 3, 4, 5, 6, 8)
    data = write_jsonl(root / "sft.jsonl", [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in numbers])
    common = [
        "algorithm.name=sft", f"data.train_files={data}", "data.max_prompt_length=32", "data.max_response_length=8",
        "data.train_batch_size=4", "data.shuffle=false", "model.dtype=float32", "trainer.total_training_steps=4",
        "cluster.device=cpu", "cluster.backend=inline", f"trainer.default_local_dir={root / 'runs'}",
    ]  # fmt: skip
    own = {
        "stop": [f"model.path={huge}", "trainer.save_freq=1"],
        "skip": [f"model.path={huge}", "trainer.on_nonfinite=skip"],
        "limit": [f"model.path={huge}", "trainer.on_nonfinite=skip", "trainer.max_nonfinite_skips=1"],
        "nan": [f"model.path={nan}", "trainer.on_nonfinite=skip"],
        "half": [f"model.path={huge}", "model.dtype=bfloat16", "actor.use_distributed_optimizer=false"],
    }
    large = _model(root / "large", "8", 1e6)
    prompts = write_jsonl(root / "rl.jsonl", [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in numbers])
    own["publish"] = [
        f"model.path={large}", f"data.train_files={prompts}", "algorithm.name=grpo", "reward.function=exact_match",
        "rollout.name=fake", "rollout.n=2", "rollout.dtype=float16",
    ]  # fmt: skip
    arguments = [["train", *common, f"trainer.experiment_name={name}", *more] for name, more in own.items()]
    done = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps(arguments)], cwd=REPO, timeout=300, capture_output=True, text=True
    )
    codes = json.loads(done.stdout.rpartition("CODES ")[2])
    return {"root": root, "codes": dict(zip(own, codes, strict=True)), "said": done.stderr, "data": data}


def _rows(runs: dict[str, Any], name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (runs["root"] / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["stop", "half"])
def test_the_run_stops_at_the_step_and_names_step_rank_and_rows(runs: dict[str, Any], name: str) -> None:
    """In float32 and bfloat16, with either optimizer; the save of step 1 stays, and no final model is written."""
    assert runs["codes"][name] == 2
    lines = [line for line in runs["said"].splitlines() if line.startswith("megatron-rl train: step 2, mini-batch 1")]
    assert len(lines) == 2
    for line in lines:
        for part in ("gradient norm nan", "rank 0", f"{runs['data']} row 8", "trainer.on_nonfinite=skip"):
            assert part in line
        assert f"{runs['data']} row 1," not in line, "rows of the other mini-batch"
    folder = runs["root"] / "runs" / name
    assert len(_rows(runs, name)) == 1
    assert not (folder / "final").exists() and not (folder / "global_step_2").exists()
    assert (folder / "global_step_1" / "actor" / "model.safetensors").exists() == (name == "stop")


def test_skipped_mini_batches_are_counted_and_the_run_ends_well(runs: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    assert runs["codes"]["skip"] == 0
    rows = _rows(runs, "skip")
    assert [row["policy/updates"] for row in rows] == [1, 0, 1, 0]
    assert [row["trainer/nonfinite_skips"] for row in rows] == [0, 1, 1, 2]
    assert rows[2]["policy/lr"] == rows[0]["policy/lr"] and "sft/loss" not in rows[1]
    assert "passed over (2 of at most 10)" in runs["said"]
    saved = load_file(runs["root"] / "runs" / "skip" / "final" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())


def test_more_skips_than_the_limit_end_the_run(runs: dict[str, Any]) -> None:
    assert runs["codes"]["limit"] == 2 and len(_rows(runs, "limit")) == 3
    assert "1 mini-batches were passed over before, which is trainer.max_nonfinite_skips" in runs["said"]


def test_a_model_with_nan_weights_is_refused_before_any_step(runs: dict[str, Any]) -> None:
    """Also where mini-batches may be skipped: every weight would be lost, not some rows."""
    assert runs["codes"]["nan"] == 2
    file = runs["root"] / "nan" / "model.safetensors"
    assert f"{file}: model.embed_tokens.weight" in runs["said"]
    assert not (runs["root"] / "runs" / "nan" / "final").exists()


def test_weights_that_the_engines_precision_cannot_hold_are_not_published(runs: dict[str, Any]) -> None:
    """1e6 is a good float32 and infinite in float16: the run ends before the first sample, naming the tensor."""
    assert runs["codes"]["publish"] == 2
    said = "the actor's weights: 1 tensors hold numbers that are not finite, or that pass 6.55e+04"
    assert (
        said in runs["said"] and "model.embed_tokens.weight -- engines keep the weights that they have" in runs["said"]
    )
    assert not (runs["root"] / "runs" / "publish").exists()
