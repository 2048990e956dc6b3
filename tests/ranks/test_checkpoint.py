"""Contract R2: a checkpoint loaded is the state that was saved, on any layout; going on from it is going on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.weights.dcp import Chunk, SavedTensors
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

STEPS = 2
LENGTHS = (5, 36, 9, 12, 20, 7, 7, 16)
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
TWO_EACH = {"ppo_micro_batch_size_per_gpu": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 20000}
Layout = tuple[int, dict[str, Any]]
Tensors = dict[str, torch.Tensor]

LAYOUTS: dict[str, Layout] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2-overlap": (2, OVERLAP),
    "dp2-plain-optimizer": (2, {"use_distributed_optimizer": False}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, **TWO_EACH}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
}
BY_DEFAULT = [("dp2", "float32"), ("tp2", "bfloat16"), ("ep2", "float32")]


class _Run:
    """A model that trains on batches by their number, with its checkpoints."""

    def __init__(
        self, folder: str, rank: int, world: int, layout: Mapping[str, Any], dtype: str, std: float | None
    ) -> None:
        self.actor = make_actor(**layout)
        self.trainable = build(folder, self.actor, world, dtype, init_std=std)
        from megatron_rl.mcore.checkpoint import SavedState
        from megatron_rl.mcore.offload import Offload
        from megatron_rl.workers.checkpoint import StateFiles

        self.rank, self.world = rank, world
        self.memory = Offload(self.trainable, ())
        self.saved = SavedState(self.trainable, self.memory)
        self.files = StateFiles(rank, world, self.actor)

    def train(self, first: int, count: int) -> list[tuple[float, float]]:
        """(loss, learning rate) of each step."""
        found = []
        for number in range(first, first + count):
            batch = random_batch(number, LENGTHS, 128)
            weights = loss_weights("token-mean", batch.loss_mask, batch.segments, batch.num_sequences, norm_length=64)
            micros = my_micro_batches(batch.with_(loss_weights=weights), self.actor, self.rank, self.world)
            report, _ = train_step(self.trainable, micros, nll_loss, 1.0)
            found.append((report.loss, report.lr))
        return found

    def save(self, folder: Path, background: bool = False) -> None:
        self.files.begin(folder, {"actor": self.saved}, background)
        self.files.finish()

    def load(self, folder: Path) -> list[str]:
        return self.files.load(folder, {"actor": self.saved}, lambda role: None)

    def export(self) -> Tensors:
        from megatron_rl.mcore.convert import export_hf

        return {name: tensor.cpu() for name, tensor in export_hf(self.trainable.model)}


def read_all(folder: Path) -> Tensors:
    """Every tensor of a checkpoint's model, whole."""
    saved = SavedTensors(folder)
    chunks = [
        Chunk(name, (0,) * len(shape), torch.zeros(shape, dtype=torch.float32 if shape else torch.int64))
        for name, shape in saved.shapes.items()
    ]
    saved.read(chunks)
    return {chunk.name: chunk.tensor for chunk in chunks}


def _save_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str, out: str) -> dict[str, Any]:
    run = _Run(folder, rank, world, layout, dtype, None)
    run.train(0, STEPS)
    run.save(Path(out) / "saved")
    weights = run.export()
    steps = run.train(STEPS, STEPS)
    run.save(Path(out) / "end")
    return {"steps": steps, "weights": weights}


def _load_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str, out: str) -> dict[str, Any]:
    run = _Run(folder, rank, world, layout, dtype, 0.3)
    notes = run.load(Path(out) / "saved")
    run.save(Path(out) / "loaded")
    weights = run.export()
    steps = run.train(STEPS, STEPS)
    run.save(Path(out) / "gone-on")
    return {"steps": steps, "weights": weights, "notes": notes}


def _differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2": save_tiny(root / "qwen2", layers=2, **SHAPE),
        "qwen3_moe": save_tiny(root / "qwen3_moe", "qwen3_moe", layers=2, tied=False),
    }


def _model(models: Mapping[str, str], *layouts: str) -> str:
    return models["qwen3_moe" if any("ep" in layout for layout in layouts) else "qwen2"]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=[] if (layout, dtype) in BY_DEFAULT else pytest.mark.slow)
        for layout in LAYOUTS
        for dtype in ("float32", "bfloat16")
    ],
)
def test_r2_going_on_from_a_checkpoint_is_going_on(
    models: dict[str, str], layout: str, dtype: str, tmp_path: Path
) -> None:
    world, axes = LAYOUTS[layout]
    folder, out = _model(models, layout), str(tmp_path)
    saved = run_ranks(world, _save_on_rank, folder, axes, dtype, out)
    loaded = run_ranks(world, _load_on_rank, folder, axes, dtype, out)
    for before, after in zip(saved, loaded, strict=True):
        assert str(before["steps"]) == str(after["steps"])
        assert not _differing(before["weights"], after["weights"])
        assert after["notes"] == []
    assert not _differing(read_all(tmp_path / "saved/actor"), read_all(tmp_path / "loaded/actor"))
    assert not _differing(read_all(tmp_path / "end/actor"), read_all(tmp_path / "gone-on/actor"))
