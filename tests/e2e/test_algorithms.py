"""Every estimator and every loss runs two steps from one config that differs by one line (by a few for DAPO)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.quickstart.make_data import make
from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.losses import LOSSES

REPO = Path(__file__).resolve().parents[2]
CONFIG = str(REPO / "configs" / "grpo-add2-1n1g.yaml")
CORRECTION = "algorithm.rollout_correction."
DAPO = [
    "actor.clip_ratio_high=0.28",
    "actor.loss_agg_mode=token-mean",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=3",
    "algorithm.overlong_buffer.enable=true",
    "algorithm.overlong_buffer.len=4",
    "algorithm.overlong_filtering=true",
]
RUNS: dict[str, list[str]] = {
    **{f"adv-{name}": [f"algorithm.adv_estimator={name}"] for name in ESTIMATORS if name != "gae"},
    **{f"loss-{name}": [f"actor.loss_mode={name}"] for name in LOSSES},
    "dapo": DAPO,
    "token-tis": [f"{CORRECTION}rollout_is=token"],
    "sequence-tis": [f"{CORRECTION}rollout_is=sequence"],
    "icepop": [f"{CORRECTION}rollout_is=icepop"],
    "rejection-with-veto": [f"{CORRECTION}rollout_rs=geometric", f"{CORRECTION}rollout_token_veto_threshold=1e-4"],
    "bypass": [f"{CORRECTION}bypass_mode=true"],
    "kl-k3+": ["actor.use_kl_loss=true", "actor.kl_loss_type=k3+", "actor.kl_loss_importance=true"],
}
# One process for all runs: starting one takes longer than the steps do.
SCRIPT = """
import json, sys
from megatron_rl.runs import verbs
from megatron_rl.config.load import load_config
config, shared, runs = json.load(sys.stdin)
for name, line in runs.items():
    verbs.train(load_config([config], [*shared, f"trainer.experiment_name={name}", *line]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Metrics of two steps each: the quick start with a random model, few rows, and a reward whose samples differ."""
    data = tmp_path_factory.mktemp("algorithms") / "data"
    make(data, seed=0)
    pq.write_table(pq.read_table(data / "train.parquet").slice(0, 32), data / "few.parquet")
    reward = data.parent / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(len(solution_str) % 2), 'length': len(solution_str)}\n"
    )
    shared = [
        f"model.path={data / 'model'}",
        "model.init=random",
        f"data.train_files={data / 'few.parquet'}",
        "data.val_files=[]",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=4",
        "actor.optim.lr_warmup_steps=0",
        "rollout.name=hf",
        "rollout.n=4",
        f"reward.function={reward}:score",
        "trainer.total_training_steps=2",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        f"trainer.default_local_dir={data.parent}",
        "cluster.backend=inline",
    ]
    given = json.dumps([CONFIG, shared, RUNS])
    subprocess.run([sys.executable, "-c", SCRIPT], input=given, text=True, check=True, cwd=REPO, timeout=600)
    files = {name: data.parent / name / "metrics.jsonl" for name in RUNS}
    return {name: [json.loads(row) for row in file.read_text().splitlines()] for name, file in files.items()}


@pytest.mark.parametrize("name", RUNS)
def test_each_runs_two_steps_from_one_config(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    """N8, R6: every run measures the mismatch and counts what it leaves out."""
    assert [row["step"] for row in runs[name]] == [1, 2]
    _check(name, runs[name])


def _check(name: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["mismatch/abs_mean"] < (1e-4 if name != "bypass" else 1.0), name
        if name != "dapo":
            assert row["policy/updates"] == 2 and 0 < row["policy/grad_norm"] < 1e4, name
    if name == "dapo":
        assert all(1 <= row["sampling/batches"] <= 3 and row["sampling/prompts"] >= 8 for row in rows)
        assert all(-1.0 <= row["reward/overlong_penalty"] < 0.0 for row in rows)
        # Nearly all responses of a random model are cut at the limit, and leave the loss.
        assert all(row["samples/overlong_left_out"] > 0 for row in rows)
        assert any(row["policy/updates"] > 0 for row in rows)
    if name in ("token-tis", "sequence-tis", "icepop"):
        assert all(row["correction/weight_mean"] == pytest.approx(1.0, abs=1e-3) for row in rows)
        assert all(row["correction/weight_cut_share"] == 0.0 for row in rows)
    if name == "rejection-with-veto":
        assert all(row["correction/masked_share"] == row["correction/vetoed_sequences"] == 0.0 for row in rows)
