"""A colocated worker on two ranks, with everything offloaded, in an order of phases that no algorithm of ours has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from examples.quickstart.make_data import make
from megatron_rl.config.load import load_config
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
    from megatron_rl.workers.records import EnginePlan, ModelColumn, Read, TrainPlan

    data = [f"model.path={folder}/model", f"data.train_files={folder}/train.parquet", "model.init=random"]
    data.append(f"cluster.n_gpus_per_node={world}")
    cfg = load_config([], [*data, *OVERRIDES])
    plan = TrainPlan("cpu", role_plans(cfg, 10, critic_optimizer_steps=10))
    worker = ColocatedWorker(rank, world, cfg, plan, EnginePlan(tuple(range(world))))
    train, engine = worker.train, worker.engine
    batch = random_batch(rank, (9, 6), 128)
    micros = [batch.with_(old_values=batch.columns["loss_weights"] * 0, returns=batch.loss_mask.float())]
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
    logprobs = train.forward(micros, "actor", Read(("logprobs",)))
    reference = train.forward(micros, "reference", Read(("logprobs", "entropy")))
    values = train.forward(micros, "critic", Read(("values",)))
    tokens.append(sampled())
    results = [train.step(micros, "critic", ValueObjective(0.5))]
    tokens.append(sampled())
    results.append(train.step(micros, "actor", NllObjective()))
    said("stale", RolloutError, sampled)
    said("frozen", FlowError, lambda: train.step(micros, "reference", NllObjective()))
    engine.publish(1, expect_change=True)
    tokens.append(sampled())
    after = train.forward(micros, "actor", Read(("logprobs",)))
    columns = get_args(ModelColumn)
    from megatron_rl.mcore.heads import READERS

    worker.close()
    return {
        "tokens": tokens,
        "columns": [[sorted(micro) for micro in read] for read in (logprobs, reference, values)],
        "same": bool((logprobs[0]["logprobs"] == reference[0]["logprobs"]).all()),
        "moved": not bool((logprobs[0]["logprobs"] == after[0]["logprobs"]).all()),
        "started from": bool((results[1].column[0] - logprobs[0]["logprobs"]).abs().max() < 1e-5),
        "values": bool((results[0].column[0] == values[0]["values"]).all()),
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
        assert found["columns"] == [[["logprobs"]], [["entropy", "logprobs"]], [["values"]]]
        assert found["same"], "the reference is the actor's start"
        assert found["moved"] and found["started from"] and found["values"]
        assert found["freed"] == [["grads", "optimizer", "params"]] * 2
        assert found["readers"], "every column of ModelColumn has a reader, and no other"
        assert "before the node `update`, or after `publish`" in found["refused"]["stale"]
        assert "actor (trained), critic (trained), reference (frozen)" in found["refused"]["frozen"]
    assert ranks[0]["tokens"] == ranks[1]["tokens"]
