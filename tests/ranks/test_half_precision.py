"""bfloat16 weights with float32 masters: they train as float32 does, and small updates add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.token_losses import nll_loss
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
OPTIMIZERS: dict[str, dict[str, Any]] = {"distributed": {}, "plain": {"use_distributed_optimizer": False}}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=2)


def _steps(trainable: Any, actor: Any, rank: int, world: int, count: int, scale: float = 1.0) -> list[float]:
    """Losses of `count` steps on two batches in turn. scale: of the loss weights; 0 makes every gradient 0."""

    losses = []
    for number in range(count):
        batch = random_batch(number % 2, LENGTHS, 128)
        batch = batch.with_(loss_weights=scale * batch.columns["loss_weights"])
        report, _ = train_step(trainable, my_micro_batches(batch, actor, rank, world), nll_loss, 1.0)
        losses.append(report.loss)
    return losses


def _half_layers(rank: int, world: int, folder: str, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an embedding and a norm give in bfloat16."""
    (chunk,) = build(folder, make_actor(), world, "bfloat16").model.bare_chunks
    ids = torch.arange(20)[None]
    with torch.no_grad():
        embedded = chunk.embedding(input_ids=ids, position_ids=ids)[:, 0]
        return {"embedded": embedded, "normed": chunk.decoder.final_layernorm(hidden)}


def test_gemmas_embeddings_and_norms_are_rounded_as_in_transformers(tmp_path: Path) -> None:
    """To the last bit: the factor on embeddings is rounded first, 1 + weight is not."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny(tmp_path / "model", "gemma3_text", layers=1)
    hidden = torch.randn(30, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    (found,) = run_ranks(1, _half_layers, folder, hidden)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model
    assert torch.equal(found["embedded"], model.embed_tokens(torch.arange(20)))
    assert torch.equal(found["normed"], model.norm(hidden))


def _weights(trainable: Any) -> Weights:
    from megatron_rl.mcore import convert

    return {name: tensor.clone() for name, tensor in convert.export_hf(trainable.model)}


def _master_dtypes(trainable: Any) -> set[torch.dtype]:
    return {param.dtype for group in trainable.optimizer.param_groups for param in group["params"]}


def _curves(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    found = {}
    for dtype in ("float32", "bfloat16"):
        for name, layout in OPTIMIZERS.items():
            actor = make_actor(**layout)
            found[f"{dtype}, {name}"] = _steps(build(folder, actor, world, dtype), actor, rank, world, 8)
    return found


def test_bfloat16_trains_as_float32_does(folder: str) -> None:
    """Loss of each of 8 steps within 2% of float32's (bfloat16 has 8 bits: 0.4% a rounding), while it falls by half."""
    for found in run_ranks(2, _curves, folder, timeout=180):
        wanted = found["float32, plain"]
        assert wanted[-1] < 0.5 * wanted[0]
        assert found["float32, distributed"] == pytest.approx(wanted, rel=1e-5)
        for name in OPTIMIZERS:
            assert found[f"bfloat16, {name}"] == pytest.approx(wanted, rel=0.02)


def _small_updates(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Weights before, after one and after 40 updates of 1e-5, which is below half a bfloat16 step of most weights."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for name, layout in OPTIMIZERS.items():
            actor = make_actor(**layout)
            actor = replace(actor, optim=replace(actor.optim, lr=1e-5, weight_decay=0.0))
            trainable = build(folder, actor, world, dtype)
            seen = [_weights(trainable)]
            for count in (1, 39):
                _steps(trainable, actor, rank, world, count)
                seen.append(_weights(trainable))
            found[f"{dtype}, {name}"] = seen
            assert _master_dtypes(trainable) == {torch.float32}
    return found


def _moved(weights: list[Weights], after: int) -> torch.Tensor:
    """Movement of the matrices since the start, float32."""
    names = [name for name, tensor in weights[0].items() if tensor.dim() > 1]
    return torch.cat([(weights[after][name].float() - weights[0][name].float()).flatten() for name in names])


def test_updates_below_bfloat16_resolution_add_up(folder: str) -> None:
    """One leaves nearly all weights as they are; 40 move them as far, and to the same side, as in float32."""
    found = run_ranks(2, _small_updates, folder, timeout=180)[0]
    for name in OPTIMIZERS:
        half, full = found[f"bfloat16, {name}"], found[f"float32, {name}"]
        first, last, wanted = _moved(half, 1), _moved(half, 2), _moved(full, 2)
        assert (first == 0).float().mean() > 0.9
        assert torch.dot(last, wanted) / torch.dot(wanted, wanted) == pytest.approx(1.0, abs=0.1)
        assert torch.cosine_similarity(last, wanted, dim=0) > 0.9


def _zero_gradient(rank: int, world: int, folder: str) -> list[str]:
    changed = []
    for dtype in ("float32", "bfloat16"):
        for name, layout in OPTIMIZERS.items():
            actor = make_actor(**layout)
            actor = replace(actor, optim=replace(actor.optim, weight_decay=0.0))
            trainable = build(folder, actor, world, dtype)
            before = _weights(trainable)
            _steps(trainable, actor, rank, world, 1, scale=0.0)
            after = _weights(trainable)
            changed += [f"{dtype}, {name}: {key}" for key in before if not torch.equal(before[key], after[key])]
            _steps(trainable, actor, rank, world, 1)
            moved = _weights(trainable)
            assert any(not torch.equal(moved[key], after[key]) for key in after), "a gradient does move them"
    return changed


def test_r2_a_step_without_gradient_leaves_loaded_weights_bitwise_unchanged(folder: str) -> None:
    """R2: the masters are the loaded weights. (Weight decay, which needs no gradient, is off.)"""
    for changed in run_ranks(2, _zero_gradient, folder):
        assert changed == []
