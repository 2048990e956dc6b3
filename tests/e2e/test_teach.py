"""examples/teach/grpo_loop.py takes the trainer's step: equal samples and rewards, equal loss, gradient and weights."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.load import load_config
from tests.helpers.data import model_folder, quickstart
from tests.helpers.run_ranks import run_ranks

REPO = Path(__file__).resolve().parents[2]
LOOP = runpy.run_path(str(REPO / "examples/teach/grpo_loop.py"))
# With AdamW's usual eps of 1e-8, entries whose gradient is nearly 0 would move by the sign of a rounding error.
LR, EPS = 4e-4, 1e-4
REWARD = "def evens(sample):\n    return sum(ord(c) % 2 == 0 for c in sample.solution_str) / 8\n"


def trainer_step(rank: int, world: int, model: str, reward: str, after: str) -> dict[str, Any]:
    """One step of the GRPO trainer in this process; its weights after it are in `after`."""
    from megatron_rl.runs.trainer import Trainer

    data = quickstart()
    cfg = load_config(
        [str(REPO / "configs/grpo-add2-1n1g.yaml")],
        [
            f"model.path={model}",
            f"data.train_files={data / 'train.parquet'}",
            "data.val_files=[]",
            "trainer.test_freq=0",
            "data.train_batch_size=4",
            "rollout.name=fake",
            "rollout.n=4",
            "cluster.backend=inline",
            f"reward.function={reward}",
            f"actor.optim.lr={LR}",
            "actor.optim.lr_scheduler=constant",
            "actor.optim.lr_warmup_steps=0",
            "actor.optim.adam_beta2=0.999",
            f"actor.optim.adam_eps={EPS}",
        ],
    )
    trainer = Trainer(cfg).start()
    try:
        values: dict[str, Any] = trainer.flow.run(prompts=trainer.parts.prompts.next(), step=1)
        trainer.save(after)
    finally:
        trainer.close()
    rollouts, scores = values["rollouts"], iter(values["results"])
    groups = [rollouts.fetch_group(number) for number in range(rollouts.num_groups)]
    (update,) = values["updates"]
    return {
        "prompts": [list(group.prompt.token_ids) for group in groups],
        "responses": [[list(rollout.token_ids) for rollout in group.rollouts] for group in groups],
        "rewards": [[next(scores).value for _ in group.rollouts] for group in groups],
        "loss": update.report.loss,
        "norm": update.report.grad_norm,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, the quick start's with weights, and reward.py."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = tmp_path_factory.mktemp("teach")
    model_folder(made / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made / "model")).float().save_pretrained(made / "model")
    (made / "reward.py").write_text(REWARD)
    return made


def test_one_step_equals_one_step_of_the_trainer(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    (step,) = run_ranks(
        1, trainer_step, str(folder / "model"), f"{folder / 'reward.py'}:evens", str(folder / "after"), timeout=120.0
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    loss, norm = LOOP["grpo_step"](model, optimizer, step["prompts"], step["responses"], step["rewards"])
    assert loss == pytest.approx(step["loss"], abs=1e-6)
    assert norm == pytest.approx(step["norm"], rel=1e-5)
    assert norm > 1e-3
    before, after = load_file(folder / "model/model.safetensors"), load_file(folder / "after/model.safetensors")
    held = model.state_dict()
    for name, tensor in after.items():
        torch.testing.assert_close(held[name], tensor, rtol=0.0, atol=1e-7)
    largest = max(float((tensor - before[name]).abs().max()) for name, tensor in after.items())
    assert largest > LR / 2
