"""What is moved to the host comes back bit for bit, into the views that it left; and in between the memory is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.types import OffloadReport
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

STEPS = 3
LENGTHS = (5, 40, 9, 12)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-rank": (1, {}),
    "dp2-plain-optimizer": (2, {"use_distributed_optimizer": False}),
    "dp2-distributed-optimizer": (2, {}),
    "pp3-vpp2": (3, {"pp": 3, "vpp": 2, "ppo_micro_batch_size_per_gpu": 1}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=6)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", layers=2)


def _steps(trainable: Any, actor: Any, rank: int, world: int, between: Any) -> list[tuple[float, float]]:

    found = []
    for number in range(STEPS):
        micros = my_micro_batches(random_batch(number, LENGTHS, 128), actor, rank, world)
        report, _ = train_step(trainable, micros, nll_loss, 1.0)
        found.append((report.loss, report.grad_norm))
        between()
    return found


def _weights(trainable: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in trainable.model.chunks for p in chunk.parameters()]


def _sizes(trainable: Any) -> dict[str, int]:
    """Bytes that are there now, counted apart from the code under test: params, grads."""
    params = [p for chunk in trainable.model.chunks for p in chunk.parameters()]
    kinds = {"params": params, "grads": [p.main_grad for p in params]}
    storages = {kind: {t.untyped_storage()._cdata: t.untyped_storage() for t in of} for kind, of in kinds.items()}
    return {kind: sum(s.nbytes() for s in of.values()) for kind, of in storages.items()}


def _run(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str, kinds: Any) -> dict[str, Any]:
    """The same steps with everything left alone, and with `kinds` away after each."""
    from megatron_rl.mcore.offload import Offload

    actor = make_actor(**layout)
    plain = build(folder, actor, world, dtype)
    wanted = _steps(plain, actor, rank, world, lambda: None), _weights(plain)
    trainable = build(folder, actor, world, dtype)
    offload = Offload(trainable, kinds)
    seen: list[tuple[dict[str, int], dict[str, int], OffloadReport]] = []

    def away_and_back() -> None:
        before = _sizes(trainable)
        grads = [p.main_grad.clone() for chunk in trainable.model.chunks for p in chunk.parameters()]
        report = offload.to_host()
        assert offload.to_host() == OffloadReport(), "it is away already"
        seen.append((before, _sizes(trainable), report))
        offload.to_device()
        assert offload.to_device() == OffloadReport(), "it is back already"
        again = [p.main_grad for chunk in trainable.model.chunks for p in chunk.parameters()]
        assert _sizes(trainable) == before and all(map(torch.equal, grads, again))

    found = _steps(trainable, actor, rank, world, away_and_back), _weights(trainable)
    # A rank that is not on the last pipeline stage knows no loss.
    same = torch.equal(torch.tensor(found[0]).nan_to_num(), torch.tensor(wanted[0]).nan_to_num())
    return {
        "same": same and all(map(torch.equal, found[1], wanted[1])),
        "learns": not torch.equal(torch.tensor(found[0][0]), torch.tensor(found[0][-1])),
        "seen": seen,
        "taken": offload.take(),
        "taken_again": offload.take(),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_with_everything_away_between_them_are_the_same_bit_for_bit(folder: str, layout: str, dtype: str) -> None:
    world, axes = LAYOUTS[layout]
    for result in run_ranks(world, _run, folder, axes, dtype, ("params", "grads", "optimizer")):
        assert result["same"] and result["learns"]
        for before, away, report in result["seen"]:
            assert away == {"params": 0, "grads": 0}
            assert report.freed["params"] == before["params"] > 0
            assert report.freed["grads"] == before["grads"] > 0
            assert report.seconds > 0
        total = result["taken"]
        assert total.freed == {kind: sum(report.freed[kind] for _, _, report in result["seen"]) for kind in total.freed}
        assert set(total.metrics()) == {
            "offload/params_bytes", "offload/grads_bytes", "offload/optimizer_bytes", "time/offload",
        }  # fmt: skip
        assert result["taken_again"].metrics() == {}


def test_experts_and_their_own_optimizer_move_too(moe_folder: str) -> None:
    for result in run_ranks(2, _run, moe_folder, {"ep": 2}, "float32", ("params", "grads", "optimizer")):
        assert result["same"] and result["learns"]
        assert all(away == {"params": 0, "grads": 0} for _, away, _ in result["seen"])


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_bytes_are_two_means_and_the_masters(folder: str, distributed: bool, dtype: str) -> None:
    """AdamW keeps 2 x 4 bytes a parameter, and half precision 4 more for its master; the distributed optimizer's shards
    add up to that.
    """
    layout = {"use_distributed_optimizer": distributed}
    results = run_ranks(2, _count, folder, layout, dtype)
    each = results[0]["parameters"] * (8 if dtype == "float32" else 12)
    found = [result["optimizer"] for result in results]
    assert (sum(found) if distributed else found[0]) == each


def _count(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str) -> dict[str, int]:
    from megatron_rl.mcore.offload import Offload

    actor = make_actor(**layout)
    trainable = build(folder, actor, world, dtype)
    _steps(trainable, actor, rank, world, lambda: None)
    report = Offload(trainable, ["optimizer"]).to_host()
    assert list(report.freed) == ["optimizer"]
    return {"optimizer": report.freed["optimizer"], "parameters": sum(w.numel() for w in _weights(trainable))}


@pytest.mark.parametrize("kind", ["params", "grads", "optimizer"])
def test_one_kind_moves_alone(folder: str, kind: str) -> None:
    for result in run_ranks(2, _run, folder, {}, "bfloat16", (kind,)):
        assert result["same"]
        for before, away, report in result["seen"]:
            assert list(report.freed) == [kind]
            assert away == {other: 0 if other == kind else size for other, size in before.items()}


def test_gradients_that_need_not_be_kept_come_back_as_zeros(folder: str) -> None:
    assert run_ranks(1, _forget_grads, folder)[0]


def _forget_grads(rank: int, world: int, folder: str) -> bool:
    from megatron_rl.mcore.offload import Offload

    actor = make_actor()
    trainable = build(folder, actor, world)
    offload = Offload(trainable, ["grads"], keep_grads=False)

    def away_and_back() -> None:
        offload.to_host("grads", "params")
        offload.to_device()

    _steps(trainable, actor, rank, world, away_and_back)
    return all(not p.main_grad.any() for chunk in trainable.model.chunks for p in chunk.parameters())
