"""Contract N2 of PPO: whole steps with a critic on two ranks equal those on one, with a fake engine's fixed samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from examples.quickstart.make_data import make
from megatron_rl.config.load import load_config
from megatron_rl.flow import constant
from megatron_rl.rewards.base import RewardResult
from megatron_rl.types import Rollouts
from tests.helpers.run_ranks import run_ranks
from tests.helpers.spmd import start_here

STEPS = 5
LAYOUTS: dict[str, list[str]] = {
    "tp2-sp": ["actor.tp=2", "actor.sequence_parallel=true"],
    "pp2": ["actor.pp=2", "actor.num_layers_in_first_pipeline_stage=2", "actor.ppo_micro_batch_size_per_gpu=3"],
    "dp2": ["critic.optimizer_offload=true", "critic.param_offload=true", "critic.grad_offload=true"],
}
COMPARED = ("policy/loss", "policy/grad_norm", "policy/clip_frac", "kl/reward", "kl/coef", "critic/value_loss")
COMPARED += ("critic/value_mean", "critic/explained_variance", "critic/clip_frac", "critic/return_mean")


class EvenTokens:
    """A reward without processes: the share of even ids."""

    def __init__(self, cfg: Any) -> None: ...

    def start(self) -> None: ...

    def preflight(self, prompts: Any) -> None: ...

    def start_models(self) -> None: ...

    def close(self) -> None: ...

    def score(self, rollouts: Rollouts) -> list[RewardResult]:
        responses, _ = rollouts.refs(range(rollouts.num_sequences)).fetch()
        return [RewardResult(float((ids % 2 == 0).mean())) for ids in responses]


def _serial(nodes: Any, sources: Any, timings: Any, during: Any) -> dict[str, Any]:
    """run_nodes, node after node: threads would call collectives in another order on each rank."""
    values, rest = dict(sources), list(nodes)
    while rest:
        node = next(node for node in rest if values.keys() >= node.inputs.keys())
        values |= node.call({name: values[name] for name in node.inputs})
        timings[node.name] = (0.0, 1.0)
        rest.remove(node)
    return values


def ppo_on_rank(
    rank: int, world: int, folder: str, overrides: list[str], edits: str = "", steps: int = STEPS
) -> list[dict[str, float]]:
    """Metrics of `steps` steps on this rank. edits: "constant" or "function" in the critic's place."""
    from megatron_rl.flow import graph
    from megatron_rl.runs.trainer import Trainer
    from megatron_rl.trainers import parts

    config = str(Path(__file__).resolve().parents[2] / "configs" / "ppo-add2-1n1g.yaml")
    own = [f"model.path={folder}/model", f"data.train_files={folder}/train.parquet", "data.val_files=[]"]
    own += ["trainer.test_freq=0", "model.init=random", "rollout.name=fake", f"cluster.n_gpus_per_node={world}"]
    cfg = load_config([config], [*own, *overrides])

    start_here(rank, world)
    parts.RunRewards, graph.run_nodes = EvenTokens, _serial  # type: ignore[assignment]
    trainer = Trainer(cfg)
    if edits == "constant":
        trainer.flow.replace("values", constant(0.0))
    if edits == "function":
        trainer.flow.replace("values", lambda batch, critic_plan: torch.full((batch.num_tokens,), 0.25))
    trainer.start()
    return [trainer.publish(trainer.learn(trainer.take(step))).metrics for step in range(1, steps + 1)]


SMALL = [
    "data.train_batch_size=12",
    "actor.ppo_mini_batch_size=6",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_epochs=1",
    "actor.optim.lr_warmup_steps=0",
    "critic.optim.lr_warmup_steps=0",
    "actor.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=100",
    "algorithm.lam_length_alpha=0.5",
    "algorithm.lam_critic=1.0",
]
SHARED = [*(key for key in SMALL if not key.startswith("critic.ppo")), "critic.share_backbone=true"]
SETTINGS = {"own": SMALL, "shared": SHARED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("ppo") / "data"
    make(made, seed=0)
    # As many prompts as the steps take: each rank reads them all.
    pq.write_table(pq.read_table(made / "train.parquet").slice(0, 12 * STEPS), made / "train.parquet")
    return str(made)


@pytest.fixture(scope="module")
def one_rank(folder: str) -> dict[str, list[dict[str, float]]]:
    return {name: _ppo(1, folder, settings)[0] for name, settings in SETTINGS.items()}


def _ppo(world: int, folder: str, overrides: list[str], *more: Any) -> list[list[dict[str, float]]]:
    return run_ranks(world, ppo_on_rank, folder, overrides, *more, timeout=240.0)


def _compare(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted) == STEPS
    for step, (here, there) in enumerate(zip(found, wanted, strict=True)):
        for name in COMPARED:
            assert here[name] == pytest.approx(there[name], rel=2e-3, abs=2e-5), (step, name)


@pytest.mark.parametrize(
    ("layout", "critic"),
    [
        *((layout, "own") for layout in LAYOUTS),
        ("tp2-sp", "shared"),
        *(pytest.param(layout, "shared", marks=pytest.mark.slow) for layout in ("pp2", "dp2")),
    ],
)
def test_n2_ppo_on_two_ranks_equals_one_over_five_steps(
    folder: str, one_rank: dict[str, list[dict[str, float]]], layout: str, critic: str
) -> None:
    """N2: losses, gradient norms, KL controller and critic agree in fp32, several mini-batches and epochs each."""
    wanted = one_rank[critic]
    assert wanted[-1]["critic/value_loss"] < wanted[0]["critic/value_loss"], "the critic learns"
    assert wanted[-1]["kl/coef"] != wanted[0]["kl/coef"], "the controller moves"
    overrides = [*SETTINGS[critic], *LAYOUTS[layout]]
    if critic == "shared":
        overrides = [key.replace("critic.", "actor.") if "offload" in key else key for key in overrides]
    for found in _ppo(2, folder, overrides):
        _compare(found, wanted)


@pytest.mark.parametrize(("edit", "value"), [("constant", 0.0), ("function", 0.25)])
def test_a_critic_replaced_by_a_constant_or_a_function_is_one_line(folder: str, edit: str, value: float) -> None:
    (steps,) = _ppo(1, folder, SMALL, edit, 1)
    for metrics in steps:
        assert metrics["critic/value_mean"] == pytest.approx(value)
        assert metrics["policy/grad_norm"] > 0


def test_the_critic_alone_is_updated_while_it_warms_up(folder: str) -> None:
    (steps,) = _ppo(1, folder, [*SMALL, "trainer.critic_warmup=2"], "", 3)
    assert [metrics["policy/updates"] for metrics in steps] == [0, 0, 4]
    assert [metrics["critic/updates"] for metrics in steps] == [3] * 3
    assert steps[1]["critic/value_loss"] < steps[0]["critic/value_loss"]
    assert steps[1]["kl/reward"] == pytest.approx(0.0, abs=1e-6), "the policy is still the reference"
