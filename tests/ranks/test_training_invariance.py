"""Contracts N2 and N3: N ranks equal one rank over steps; the split into micro-batches changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_rl.algos.losses import nll_loss
from megatron_rl.algos.reduce import loss_weights
from tests.ranks.run_ranks import run_ranks
from tests.ranks.tiny import random_batch, save_tiny
from tests.ranks.training import build, make_actor, my_micro_batches

STEPS = 8
LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "dp2-plain-optimizer": (2, {"use_distributed_optimizer": False}),
    "dp2-tp2-sp": (4, {"tp": 2, "sequence_parallel": True}),
    "dp4": (4, {}),
    "pp2": (2, {"pp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "pp4": (4, {"pp": 4, "ppo_micro_batch_size_per_gpu": 2}),
    "pp4-vpp2": (4, {"pp": 4, "vpp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "pp2-uneven": (2, {"pp": 2, "num_layers_in_first_pipeline_stage": 5, "ppo_micro_batch_size_per_gpu": 2}),
    "cp2": (2, {"cp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "cp4": (4, {"cp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2, "sequence_parallel": True, "ppo_micro_batch_size_per_gpu": 2}),
    "tp2-pp2-cp2": (8, {"tp": 2, "pp": 2, "cp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "recompute-full": (1, {"recompute": "full"}),
    "recompute-selective-cp2": (2, {"cp": 2, "recompute": "selective"}),
    "micro-batches-of-one": (1, {"ppo_micro_batch_size_per_gpu": 1}),
    "micro-batches-by-tokens": (1, {"max_tokens_per_gpu": 48}),
    "padded-pp2": (2, {"packing": False, "pp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "padded-tp2-sp-cp2": (4, {"packing": False, "tp": 2, "sequence_parallel": True, "cp": 2}),
}


def _train_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any], mode: str) -> list[tuple[float, float]]:
    from megatron_rl.mcore import step

    actor = make_actor(**layout)
    trainable = build(folder, actor, world)
    trajectory = []
    for number in range(STEPS):
        batch = random_batch(number % 2, LENGTHS, 128)
        weights = loss_weights(mode, batch.loss_mask, batch.segment_ids(), batch.num_sequences, norm_length=64)
        micros = my_micro_batches(batch.with_(loss_weights=weights), actor, rank, world)
        report, _ = step.train_step(trainable, micros, nll_loss, 1.0)
        trajectory.append((report.loss, report.grad_norm))
    return trajectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=8)


@pytest.fixture(scope="module")
def one_rank(folder: str) -> dict[str, list[tuple[float, float]]]:
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    return {mode: run_ranks(1, _train_on_rank, folder, {}, mode)[0] for mode in modes}


def _assert_same(trajectory: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    assert wanted[-1][0] < wanted[0][0], "the run that everything is compared with must learn"
    for (loss, norm), (wanted_loss, wanted_norm) in zip(trajectory, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=2e-5, abs=2e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_n2_n3_layouts_train_like_one_rank(
    folder: str, one_rank: dict[str, list[tuple[float, float]]], layout: str
) -> None:
    """N2, N3: loss within 2e-5 and grad norm within 1e-4 relative over 8 optimizer steps, on every rank."""
    world, axes = LAYOUTS[layout]
    trajectories = run_ranks(world, _train_on_rank, folder, axes, "token-mean")
    # Ranks of earlier pipeline stages have no loss to report; the last rank is always of the last stage.
    reporting = [trajectory for trajectory in trajectories if not math.isnan(trajectory[0][0])]
    assert trajectories[-1] in reporting
    for trajectory in reporting:
        _assert_same(trajectory, one_rank["token-mean"])
    for trajectory in trajectories:
        norms = [norm for _, norm in trajectory]
        assert norms == pytest.approx([norm for _, norm in one_rank["token-mean"]], rel=1e-4)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_n3_every_aggregation_is_invariant(
    folder: str, one_rank: dict[str, list[tuple[float, float]]], mode: str
) -> None:
    """N3: denominators are global in every aggregation mode."""
    for trajectory in run_ranks(2, _train_on_rank, folder, {"ppo_micro_batch_size_per_gpu": 2}, mode):
        _assert_same(trajectory, one_rank[mode])
