"""A colocated worker on two ranks, with everything offloaded, in an order of phases that no algorithm of ours has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch

from examples.quickstart.make_data import make
from megatron_rl.config.load import load_config
from megatron_rl.types import Column
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch

PROMPTS = ((5, 17, 9), (40,) * 6)
OFFLOADED = [f"{role}.{kind}_offload=true" for role in ("actor", "critic") for kind in ("param", "grad", "optimizer")]
OVERRIDES = [
    *OFFLOADED,
    "algorithm.name=ppo",
    "algorithm.adv_estimator=gae",
    "critic.enable=true",
    "critic.optim.lr=1e-2",
    "actor.optim.lr=1e-2",
    "actor.use_kl_loss=true",
    "model.dtype=float32",
    "rollout.name=hf",
    "rollout.n=1",
    "data.max_prompt_length=8",
    "data.max_response_length=8",
    "data.train_batch_size=2",
]


def _walk(rank: int, world: int, folder: str) -> dict[str, Any]:
    from megatron_rl.errors import FlowError, RolloutError
    from megatron_rl.rollout.engine import Request, Sampling
    from megatron_rl.trainers.placement import role_plans
    from megatron_rl.workers.colocated import ColocatedWorker
    from megatron_rl.workers.objectives import NllObjective, ValueObjective
    from megatron_rl.workers.rank_batch import MaskedSequences
    from megatron_rl.workers.records import EnginePlan, ModelColumn, Read, TrainPlan

    data = [f"model.path={folder}/model", f"data.train_files={folder}/train.parquet", "model.init=random"]
    data.append(f"cluster.n_gpus_per_node={world}")
    cfg = load_config([], [*data, *OVERRIDES])
    plan = TrainPlan("cpu", role_plans(cfg, 10, critic_optimizer_steps=10))
    worker = ColocatedWorker(rank, world, cfg, plan, EnginePlan(tuple(range(world))))
    train, engine = worker.train, worker.engine
    batch = random_batch(rank, (9, 6), 128)
    tokens_of, masks = ([part.numpy() for part in one.split((9, 6))] for one in (batch.tokens.int(), batch.loss_mask))
    train.batch.load(MaskedSequences((0, 1), tuple(tokens_of), tuple(masks)))
    train.batch.put(batch.columns["loss_weights"], "loss_weights")
    train.batch.put(torch.zeros(15), "old_values")
    train.batch.put(torch.ones(15), "returns")
    micros = ((0, 1),)
    for_values: dict[str, Column] = {"old_values": "old_values", "returns": "returns", "loss_weights": "loss_weights"}
    for_nll: dict[str, Column] = {"loss_weights": "loss_weights"}
    fetch = train.batch.fetch
    refused: dict[str, str] = {}

    def sampled() -> list[int]:
        sampling = Sampling(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=6, stop_token_ids=())
        return engine.generate([Request(prompt) for prompt in PROMPTS], sampling).samples.fetch().token_ids.tolist()

    def said(name: str, kind: type[Exception], call: Any) -> None:
        try:
            call()
        except kind as error:
            refused[name] = str(error)

    engine.publish(0, expect_change=False)
    tokens = [sampled()]
    train.forward(micros, "actor", Read(("logprobs",)), {"logprobs": "old_logprobs"})
    train.forward(micros, "reference", Read(("logprobs", "greedy")), {"logprobs": "ref_logprobs", "greedy": "greedy"})
    train.forward(micros, "critic", Read(("values",)), {"values": "values"})
    tokens.append(sampled())
    results = [train.step(micros, "critic", ValueObjective(0.5), for_values, "returns")]
    tokens.append(sampled())
    results.append(train.step(micros, "actor", NllObjective(), for_nll, "train_logprobs"))
    said("stale", RolloutError, sampled)
    said("frozen", FlowError, lambda: train.step(micros, "reference", NllObjective(), for_nll))
    old, values, started_from = (fetch(column).clone() for column in ("old_logprobs", "values", "train_logprobs"))
    engine.publish(1, expect_change=True)
    tokens.append(sampled())
    train.forward(micros, "actor", Read(("logprobs",)), {"logprobs": "old_logprobs"})
    columns = get_args(ModelColumn)
    from megatron_rl.mcore.heads import READERS

    worker.close()
    return {
        "tokens": tokens,
        "greedy": sorted(set(fetch("greedy").tolist())),
        "same": bool((old == fetch("ref_logprobs")).all()),
        "moved": not bool((old == fetch("old_logprobs")).all()),
        "started from": bool((started_from - old).abs().max() < 1e-5),
        "values": bool((fetch("returns") == values).all()),
        "freed": [sorted(result.offload.freed) for result in results],
        "readers": set(columns) == set(READERS),
        "refused": refused,
    }


def test_late_sampling_works_stale_sampling_is_refused_and_a_pass_brings_what_was_asked_for(tmp_path: Path) -> None:
    """A sample after model passes, and after the critic's update, is the one before them. All ranks alike."""
    make(tmp_path, seed=0)
    ranks = run_ranks(2, _walk, str(tmp_path))
    for found in ranks:
        before, late, later, published = found["tokens"]
        assert before == late == later != published
        assert set(found["greedy"]) <= {0.0, 1.0}
        assert found["same"], "the reference is the actor's start"
        assert found["moved"] and found["started from"] and found["values"]
        assert found["freed"] == [["grads", "optimizer", "params"]] * 2
        assert found["readers"], "every column of ModelColumn has a reader, and no other"
        assert "before the node `update`, or after `publish`" in found["refused"]["stale"]
        assert "actor (trained), critic (trained), reference (frozen)" in found["refused"]["frozen"]
    assert ranks[0]["tokens"] == ranks[1]["tokens"]
