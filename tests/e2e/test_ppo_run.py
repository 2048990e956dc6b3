"""Whole PPO runs on the quick start's task: a critic of its own, and one that shares the actor's transformer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
CONFIG = str(REPO / "configs" / "ppo-add2-1n1g.yaml")
STEPS = 2


def _run(data: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Train in a process of its own; returns the rows of metrics.jsonl."""
    own = [
        f"model.path={data / 'model'}",
        "model.init=random",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"trainer.default_local_dir={data.parent}",
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "data.train_batch_size=16",
        "actor.ppo_mini_batch_size=8",
        "actor.optim.lr_warmup_steps=0",
        "critic.optim.lr_warmup_steps=0",
        "rollout.name=hf",
        "cluster.backend=inline",
    ]
    command = [sys.executable, "-m", "megatron_rl", "train", CONFIG, *own, *overrides]
    subprocess.run(command, check=True, cwd=REPO, timeout=300)
    return [json.loads(line) for line in (data.parent / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ppo_runs_and_saves_actor_and_critic(data: Path, shared: bool) -> None:
    """Two steps; N8, R4. The actor's folder is a language model, the critic's a token classifier of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    name = f"shared-{shared}"
    reward = data.parent / "reward.py"
    reward.write_text("def score(sample):\n    return float(len(sample.solution_str) % 2)\n")
    rows = _run(data, name, f"reward.function={reward}:score", f"critic.share_backbone={str(shared).lower()}")
    assert [row["step"] for row in rows] == [1, 2] and rows[-1]["val/num_samples"] == 400
    for row in rows:
        assert row["mismatch/abs_max"] < 1e-4, "N8: the engine holds the actor's weights, and no value head"
        assert row["policy/grad_norm"] > 0 and row["critic/value_loss"] > 0
        assert ("critic/grad_norm" in row) == (not shared)
    assert rows[0]["critic/value_mean"] == 0.0 and rows[1]["critic/value_mean"] != 0.0, "a new head starts at 0"
    folder = data.parent / name
    AutoModelForCausalLM.from_pretrained(folder / "final")
    critic = AutoModelForTokenClassification.from_pretrained(folder / "critic", dtype=torch.float32)
    actor = AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float32)
    assert bool(critic.score.weight.any()) and critic.config.num_labels == 1
    same = torch.equal(critic.model.norm.weight, actor.model.norm.weight)
    assert same == shared, "one transformer, or two that went their own ways"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_quick_start_ppo_raises_accuracy(data: Path, shared: bool) -> None:
    """From the quick start's SFT model, greedy held-out accuracy rises by 0.10 or more (benchmarks/ppo_quickstart.py
    does so for several seeds).
    """
    from benchmarks.ppo_quickstart import train_ppo, train_sft

    train_sft(data, 0)
    result = train_ppo(data, 0, shared)
    assert result["after"] - result["before"] >= 0.10, result
