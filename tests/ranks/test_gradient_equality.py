"""Contract N3: the same 8 sequences give the same gradient, however they are cut, packed or spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.algos.token_losses import nll_loss
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
SPLITS: dict[str, tuple[int, int | None]] = {
    "1-micro-batch-of-8": (1, None),
    "4-micro-batches-of-2": (1, 2),
    "8-micro-batches-of-1": (1, 1),
    "dp2": (2, None),
    "dp2-micro-batches-of-1": (2, 1),
    "dp4": (4, None),
}


def _gradients(rank: int, world: int, folder: str, size: int | None, packing: bool) -> dict[str, Any]:
    from megatron_rl.mcore import convert, step

    # Plain optimizer: its all-reduce leaves the whole gradient on each rank. No clipping, which would scale it.
    actor = make_actor(
        grad_clip=0.0, use_distributed_optimizer=False, ppo_micro_batch_size_per_gpu=size, packing=packing
    )
    trainable = build(folder, actor, world)
    micros = my_micro_batches(random_batch(0, LENGTHS, 128), actor, rank, world)
    report, _ = train_step(trainable, micros, nll_loss, 1.0)
    grads = dict(convert.export_hf(trainable.model, of=lambda p: p.main_grad.clone()))  # type: ignore[attr-defined]
    tokens = sum(micro.tokens.shape[1] for micro in step.pack_all(trainable.model, micros))
    return {"grads": grads, "report": report, "tokens": tokens, "micros": len(micros)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def _both(rank: int, world: int, folder: str, size: int | None) -> dict[str, dict[str, Any]]:
    return {name: _gradients(rank, world, folder, size, name == "packed") for name in ("packed", "padded")}


@pytest.fixture(scope="module")
def whole(folder: str) -> dict[str, dict[str, Any]]:
    """One rank, one micro-batch; packed and padded."""
    return run_ranks(1, _both, folder, None)[0]


@pytest.mark.parametrize("split", SPLITS)
def test_n3_gradients_are_equal(folder: str, whole: dict[str, dict[str, Any]], split: str) -> None:
    """N3: every tensor's gradient and their norm within 1e-6 relative in float32, on every rank, packed and padded."""
    world, size = SPLITS[split]
    wanted = whole["packed"]
    for of_rank in [whole] if (world, size) == (1, None) else run_ranks(world, _both, folder, size):
        for result in of_rank.values():
            assert result["report"].loss == pytest.approx(wanted["report"].loss, rel=1e-6)
            assert result["report"].grad_norm == pytest.approx(wanted["report"].grad_norm, rel=1e-6)
            assert result["grads"].keys() == wanted["grads"].keys()
            difference = torch.stack([(result["grads"][name] - grad).norm() for name, grad in wanted["grads"].items()])
            norm = torch.stack([grad.norm() for grad in wanted["grads"].values()]).norm()
            assert difference.norm() / norm < 1e-6
            for name, grad in wanted["grads"].items():
                assert (result["grads"][name] - grad).norm() < 1e-6 * norm, name


def test_packing_computes_no_padding_and_padding_does(whole: dict[str, dict[str, Any]]) -> None:
    packed, padded = whole["packed"], whole["padded"]
    assert (packed["tokens"], packed["micros"]) == (sum(LENGTHS), 1)
    assert (padded["tokens"], padded["micros"]) == (max(LENGTHS) * len(LENGTHS), 1)
