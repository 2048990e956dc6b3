"""Contracts N2 and N3: N ranks equal one rank over steps; the split into micro-batches changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import nll_loss
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

STEPS = 8
LENGTHS = (5, 36, 9, 12, 20, 7, 7, 16)
# Small, and every axis of 4 divides it. Two layers, where the pipeline's chunks do not need more.
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
LAYERS = {"pp2-uneven": 4, "pp4": 4, "pp4-vpp2": 8}
TWO_EACH = {"ppo_micro_batch_size_per_gpu": 2}
FOUR_EACH = {"ppo_micro_batch_size_per_gpu": 4}
# Several buckets in a model of some 150 thousand parameters.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 20000}
Variant = tuple[str, bool]
"""The model's name (tied or untied), and whether its batches are packed (padded otherwise)."""
EVERY: tuple[Variant, ...] = (("tied", True), ("untied", True), ("tied", False), ("untied", False))
PLAIN = EVERY[:1]
Trajectory = list[tuple[float, float]]
"""Loss and gradient norm of each step"""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "dp2-overlap": (2, {**OVERLAP, "ppo_micro_batch_size_per_gpu": 3}),
    "pp2": (2, {"pp": 2, **TWO_EACH}),
    "pp2-uneven": (2, {"pp": 2, "num_layers_in_first_pipeline_stage": 3, **TWO_EACH}),
    "pp4": (4, {"pp": 4, **TWO_EACH}),
    "pp4-vpp2": (4, {"pp": 4, "vpp": 2, **TWO_EACH}),
    "cp2": (2, {"cp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2, "sequence_parallel": True, **TWO_EACH}),
    "tp2-pp2-cp2": (8, {"tp": 2, "pp": 2, "cp": 2, **FOUR_EACH}),
}
# Mixes and settings beside the axes: one variant each.
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-plain-optimizer": (2, {"use_distributed_optimizer": False}),
    "dp2-plain-optimizer-overlap": (2, {"use_distributed_optimizer": False, "overlap_grad_reduce": True}),
    "dp2-tp2-sp": (4, {"tp": 2, "sequence_parallel": True}),
    "dp4": (4, {}),
    "dp2-pp2-overlap": (4, {"pp": 2, **OVERLAP, **TWO_EACH}),
    "cp2-overlap-recompute": (2, {"cp": 2, "recompute": "full", **OVERLAP}),
    "cp4": (4, {"cp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, **TWO_EACH}),
    "recompute-full": (1, {"recompute": "full"}),
    "recompute-selective-cp2": (2, {"cp": 2, "recompute": "selective"}),
    "micro-batches-of-one": (1, {"ppo_micro_batch_size_per_gpu": 1}),
    "micro-batches-by-tokens": (1, {"max_tokens_per_gpu": 48}),
}


def _train_on_rank(
    rank: int, world: int, folders: dict[str, str], layout: dict[str, Any], variants: Sequence[Variant], mode: str
) -> list[Trajectory]:
    return [_trajectory(rank, world, folders[name], {**layout, "packing": packed}, mode) for name, packed in variants]


def _trajectory(rank: int, world: int, folder: str, layout: dict[str, Any], mode: str) -> Trajectory:

    actor = make_actor(**layout)
    trainable = build(folder, actor, world)
    found = []
    for number in range(STEPS):
        batch = random_batch(number % 2, LENGTHS, 128)
        weights = loss_weights(mode, batch.loss_mask, batch.segments, batch.num_sequences, norm_length=64)
        micros = my_micro_batches(batch.with_(loss_weights=weights), actor, rank, world)
        report, _ = train_step(trainable, micros, nll_loss, 1.0)
        found.append((report.loss, report.grad_norm))
    return found


def _save(folder: Path, layers: int) -> dict[str, str]:
    return {name: save_tiny(folder / name, tied=name == "tied", layers=layers, **SHAPE) for name in ("tied", "untied")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Layers -> model's name -> its folder."""
    return {layers: _save(tmp_path_factory.mktemp(f"layers{layers}"), layers) for layers in (2, 4, 8)}


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.fixture(scope="module")
def one_rank(folders: dict[int, dict[str, str]]) -> dict[tuple[int, str], Trajectory]:
    """(layers, model's name) -> what every layout must do: one rank, packed."""
    found: dict[tuple[int, str], Trajectory] = {}
    for layers, of_layers in folders.items():
        tied, untied = run_ranks(1, _train_on_rank, of_layers, {}, EVERY[:2], "token-mean")[0]
        found |= {(layers, "tied"): tied, (layers, "untied"): untied}
    return found


def _assert_same(trajectory: Trajectory, wanted: Trajectory, *, has_loss: bool) -> None:
    assert wanted[-1][0] < wanted[0][0], "the run that everything is compared with must learn"
    for (loss, norm), (wanted_loss, wanted_norm) in zip(trajectory, wanted, strict=True):
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
        if has_loss:
            assert loss == pytest.approx(wanted_loss, rel=2e-5, abs=2e-5)
        else:
            assert math.isnan(loss), "ranks of earlier pipeline stages have no loss to report"


@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE_LAYOUTS])
def test_n2_n3_layouts_train_like_one_rank(
    folders: dict[int, dict[str, str]], one_rank: dict[tuple[int, str], Trajectory], layout: str
) -> None:
    """N2, N3: loss within 2e-5 and grad norm within 1e-4 relative over 8 optimizer steps, on every rank; tied and
    untied, packed and padded.
    """
    world, axes = (LAYOUTS | MORE_LAYOUTS)[layout]
    variants = EVERY if layout in LAYOUTS else PLAIN
    layers = LAYERS.get(layout, 2)
    results = run_ranks(world, _train_on_rank, folders[layers], axes, variants, "token-mean", timeout=180)
    last_stage = range(world - world // axes.get("pp", 1), world)
    for rank, trajectories in enumerate(results):
        for (name, _), trajectory in zip(variants, trajectories, strict=True):
            _assert_same(trajectory, one_rank[layers, name], has_loss=rank in last_stage)


FEW_LAYOUTS = ("tp2-sp", "dp2", "pp2", "cp2-tp2", "cp2-overlap-recompute", "recompute-selective-cp2")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma", "gemma3_text"])
def test_n2_families_with_norms_of_their_own_train_like_one_rank(tmp_path: Path, family: str) -> None:
    """N2, of zero-centered norms, norms behind attention and MLP, and windows and RoPE by layer; packed and padded."""
    folder = {"tied": save_tiny(tmp_path / "model", family, tied=True, layers=2, **SHAPE)}
    (wanted,) = run_ranks(1, _train_on_rank, folder, {}, PLAIN, "token-mean")[0]
    for layout in FEW_LAYOUTS:
        world, axes = (LAYOUTS | MORE_LAYOUTS)[layout]
        variants: tuple[Variant, ...] = (("tied", True), ("tied", False))
        for trajectory in run_ranks(world, _train_on_rank, folder, axes, variants, "token-mean", timeout=180)[-1]:
            _assert_same(trajectory, wanted, has_loss=True)


def test_n3_every_aggregation_is_invariant(folders: dict[int, dict[str, str]]) -> None:
    """N3: denominators are global in every aggregation mode."""
    wanted = run_ranks(1, _every_mode, folders[2], {})[0]
    for found in run_ranks(2, _every_mode, folders[2], TWO_EACH):
        for mode, trajectory in found.items():
            _assert_same(trajectory, wanted[mode], has_loss=True)


def _every_mode(rank: int, world: int, folders: dict[str, str], layout: dict[str, Any]) -> dict[str, Trajectory]:
    return {mode: _trajectory(rank, world, folders["tied"], layout, mode) for mode in MODES}
