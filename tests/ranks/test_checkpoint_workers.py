"""Checkpoints of a colocated worker: actor and critic, with memory on the host or shared with the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.quickstart.make_data import make
from megatron_rl.config.load import load_config
from megatron_rl.types import Column
from tests.helpers.checkpoints import differing, read_all
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch

PROMPTS = ((5, 17, 9), (40,) * 6)
OVERRIDES = [
    "algorithm.name=ppo",
    "algorithm.adv_estimator=gae",
    "critic.enable=true",
    "critic.optim.lr=1e-2",
    "actor.optim.lr=1e-2",
    "rollout.name=hf",
    "rollout.n=1",
    "data.max_prompt_length=8",
    "data.max_response_length=8",
    "data.train_batch_size=2",
    "model.init=random",
]
CASES = {
    "offloaded": ["model.dtype=bfloat16"]
    + [f"{role}.{kind}_offload=true" for role in ("actor", "critic") for kind in ("param", "grad", "optimizer")],
    "shared-memory": ["model.dtype=float32"],
    "shared-backbone": ["model.dtype=float32", "critic.share_backbone=true"],
}


class _Worker:
    """A worker whose actor and critic learn from one batch of this rank."""

    def __init__(self, rank: int, world: int, folder: str, overrides: list[str], seed: int) -> None:
        from megatron_rl.trainers.placement import role_plans
        from megatron_rl.workers.colocated import ColocatedWorker
        from megatron_rl.workers.rank_batch import MaskedSequences
        from megatron_rl.workers.records import EnginePlan, TrainPlan

        data = [f"model.path={folder}/model", f"data.train_files={folder}/train.parquet", f"trainer.seed={seed}"]
        data.append(f"cluster.n_gpus_per_node={world}")
        cfg = load_config([], [*data, *OVERRIDES, *overrides])
        plan = TrainPlan("cpu", role_plans(cfg, 10, critic_optimizer_steps=10))
        self._worker = ColocatedWorker(rank, world, cfg, plan, EnginePlan(tuple(range(world))))
        self.train, self.engine = self._worker.train, self._worker.engine
        batch = random_batch(rank, (9, 6), 128)
        tokens, masks = ([of.numpy() for of in one.split((9, 6))] for one in (batch.tokens.int(), batch.loss_mask))
        self.train.batch.load(MaskedSequences((0, 1), tuple(tokens), tuple(masks)))
        self.train.batch.put(batch.columns["loss_weights"], "loss_weights")
        self.train.batch.put(torch.zeros(15), "old_values")
        self.train.batch.put(torch.ones(15), "returns")

    def step(self) -> None:
        """One update of each model."""
        from megatron_rl.workers.objectives import NllObjective, ValueObjective

        values: dict[str, Column] = {
            "old_values": "old_values",
            "returns": "returns",
            "loss_weights": "loss_weights",
        }
        if "critic" in self.train.trained:
            self.train.step(((0, 1),), "critic", ValueObjective(0.5), values)
        self.train.step(((0, 1),), "actor", NllObjective(), {"loss_weights": "loss_weights"})

    def sampled(self) -> list[int]:
        from megatron_rl.rollout.engine import Request, Sampling

        sampling = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=6, stop_token_ids=())
        answer = self.engine.generate([Request(prompt) for prompt in PROMPTS], sampling)
        return answer.samples.fetch().token_ids.tolist()

    def close(self) -> None:
        self._worker.close()


def _save_on_rank(rank: int, world: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    worker = _Worker(rank, world, folder, overrides, seed=1)
    worker.engine.publish(0, expect_change=False)
    worker.step()
    worker.engine.publish(1, expect_change=True)
    tokens = worker.sampled()
    worker.train.save_state(f"{folder}/foreground", background=False)
    foreground = worker.train.finish_save()
    worker.train.save_state(f"{folder}/background", background=True)
    for _ in range(3):
        worker.step()
    background = worker.train.finish_save()
    worker.train.save_state(f"{folder}/later", background=True)
    later = worker.train.finish_save()
    worker.close()
    return {"tokens": tokens, "foreground": foreground, "background": background, "later": later}


def _load_on_rank(rank: int, world: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    worker = _Worker(rank, world, folder, overrides, seed=2)
    notes = worker.train.load_state(f"{folder}/background")
    worker.engine.publish(1, expect_change=True)
    tokens = worker.sampled()
    worker.train.save_state(f"{folder}/loaded", background=True)
    loaded = worker.train.finish_save()
    for _ in range(3):
        worker.step()
    worker.train.save_state(f"{folder}/gone-on", background=False)
    worker.train.finish_save()
    worker.close()
    return {"tokens": tokens, "loaded": loaded, "notes": notes}


@pytest.mark.parametrize(
    "case", [*list(CASES)[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])]
)
def test_r2_a_worker_goes_on_from_its_checkpoint(case: str, tmp_path: Path) -> None:
    """A save in the background, while training goes on, has the same bytes as one that training waits for; and the
    same again when it is saved after a load. Engines sample the same.
    """
    make(tmp_path, seed=0)
    saved = run_ranks(2, _save_on_rank, str(tmp_path), CASES[case])
    loaded = run_ranks(2, _load_on_rank, str(tmp_path), CASES[case])
    for before, after in zip(saved, loaded, strict=True):
        assert after["notes"] == []
        assert before["tokens"] == after["tokens"]
        assert before["foreground"] == before["background"] == after["loaded"] != before["later"]
    roles = ["actor"] if case == "shared-backbone" else ["actor", "critic"]
    assert sorted(folder.name for folder in (tmp_path / "loaded").iterdir()) == sorted([*roles, "ranks"])
    for role in roles:
        assert not differing(read_all(tmp_path / "later" / role), read_all(tmp_path / "gone-on" / role))
    heads = {role: "param/score.weight" in read_all(tmp_path / "loaded" / role) for role in roles}
    assert heads == {role: role == roles[-1] for role in roles}
