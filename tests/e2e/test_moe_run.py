"""A whole GRPO run of a model with experts on two expert-parallel Ray workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.make_data import make
from tests.e2e.test_runs import DP2, GRPO, _run
from tests.helpers.stack import needs_cpu_engine

FIELDS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@needs_cpu_engine
@pytest.mark.slow
def test_grpo_of_experts_on_two_expert_parallel_workers(tmp_path: Path) -> None:
    """N8: engines on each rank agree with the split model; the saved model is whole."""
    from transformers import AutoModelForCausalLM

    data = tmp_path / "data"
    make(data, seed=0)
    config = json.loads((data / "model" / "config.json").read_text())
    (data / "model" / "config.json").write_text(json.dumps(config | FIELDS))
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 2\n"
    )
    options = [
        *DP2,
        "actor.ep=2",
        "model.init=random",
        f"reward.function={reward}:score",
        "trainer.total_training_steps=2",
        "trainer.test_freq=0",
        "trainer.val_before_train=false",
        "actor.optim.lr_warmup_steps=0",
        "data.train_batch_size=8",
        "actor.use_kl_loss=true",
    ]
    rows = [row for row in _run(GRPO, data, "moe", options) if "policy/updates" in row]
    assert len(rows) == 2
    assert all(row["mismatch/abs_max"] < 1e-4 and row["policy/grad_norm"] > 0 for row in rows)
    final = str(tmp_path / "moe" / "final")
    loaded: Any = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    model, loading = loaded
    assert model.config.model_type == "qwen3_moe"
    assert not any(loading.values()), loading
