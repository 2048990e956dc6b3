"""`megatron-rl eval`: answers and scores of each sample are kept, no training data is read, nothing is written over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


def evaluate(data: Path, *settings: str) -> Path:
    """The folder that an evaluation wrote."""
    out = data.parent / "out"
    before = set(out.iterdir()) if out.is_dir() else set()
    own = [
        f"model.path={data / 'model'}",
        "model.init=random",
        f"trainer.default_local_dir={out}",
        "model.dtype=float32",
    ]
    own += ["cluster.backend=inline", "cluster.device=cpu", "data.max_prompt_length=12", "data.max_response_length=8"]
    command = [sys.executable, "-m", "megatron_rl", "eval", *own, "data.chat_template=plain", *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = set(out.iterdir()) - before
    assert str(folder) in done.stdout
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_eval_keeps_every_answer_with_its_score(data: Path) -> None:
    settings = [
        f"data.val_files={data / 'val.parquet'}",
        "rollout.name=fake",
        "rollout.val.n=2",
        "reward.function=exact_match",
    ]
    settings += ["rollout.val.temperature=1.0", "trainer.experiment_name=sums"]
    folder = evaluate(data, *settings)
    assert folder.name == "sums-eval"
    metrics, rows = json.loads((folder / "metrics.json").read_text()), rows_of(folder)
    assert len(rows) == metrics["val/num_samples"] == 2 * metrics["val/num_rows"]
    assert sorted({row["row"] for row in rows}) == list(range(int(metrics["val/num_rows"])))
    assert metrics["val/accuracy"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    assert all(row["prompt"] and row["ground_truth"] is not None and "response" in row for row in rows)
    record = json.loads((folder / "run.json").read_text())
    assert "eval" in record["command"] and record["versions"]["megatron_rl"] and record["started"].endswith("+00:00")
    kept = (folder / "answers.jsonl").read_bytes()
    assert evaluate(data, *settings).name == "sums-eval-2"
    assert (folder / "answers.jsonl").read_bytes() == kept


def test_eval_of_sft_keeps_each_rows_loss(data: Path) -> None:
    settings = [f"data.val_files={data / 'sft_val.parquet'}", "algorithm.name=sft", "trainer.experiment_name=sft"]
    folder = evaluate(data, *settings)
    metrics, rows = json.loads((folder / "metrics.json").read_text()), rows_of(folder)
    tokens = sum(row["num_tokens"] for row in rows)
    assert len(rows) == metrics["val/num_samples"] and metrics["val/loss"] == pytest.approx(
        sum(row["loss"] for row in rows) / tokens
    )
