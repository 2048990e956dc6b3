"""A run whose reward is a sum of a reward model, a judge and a rule, each in workers of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.quickstart.make_data import make
from megatron_rl.config.load import load_config
from megatron_rl.runs import verbs
from tests.unit.rewards.test_models import classifier, sevens

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "grpo-add2-1n1g.yaml"


@pytest.mark.slow
def test_a_run_sums_a_reward_model_a_judge_and_a_rule_over_ray(tmp_path: Path):
    make(tmp_path / "data", seed=0)
    options = {
        "model.path": tmp_path / "data" / "model",
        "model.init": "random",
        "data.train_files": tmp_path / "data" / "train.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": 4,
        "actor.optim.lr_warmup_steps": 0,
        "rollout.name": "hf",
        "rollout.n": 2,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 0,
        "trainer.default_local_dir": tmp_path,
        "reward.function": "model + 0.5 * numeric + 0.1 * judge",
        "reward.model.path": classifier(tmp_path / "rm"),
        "reward.model.num_workers": 2,
        "reward.model.num_cpus": 0.25,
        "reward.judge.path": sevens(tmp_path / "judge"),
        "reward.judge.engine": "hf",
        "reward.judge.template": "Rate {response}",
        "reward.judge.score_pattern": r"^(\d)",
        "reward.judge.max_tokens": 4,
        "reward.judge.num_cpus": 0.25,
        "cluster.num_cpus_per_rank": 0.5,
    }
    verbs.train(load_config([str(CONFIG)], [f"{key}={value}" for key, value in options.items()]))
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        parts = row["reward/model"] + 0.5 * row["reward/numeric"] + 0.1 * row["reward/judge"]
        assert row["reward/failed"] == 0 and row["reward/judge"] == pytest.approx(0.7)
        assert row["reward/mean"] == pytest.approx(parts, abs=1e-5)
