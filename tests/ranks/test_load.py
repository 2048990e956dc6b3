"""Weights are read by one rank of those that hold the same, and all have them then; what is wrong is raised by all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import CheckpointError
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.parallel.topology import topology_of
from megatron_rl.weights.safetensors import SafetensorsSource
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import save_tiny
from tests.helpers.training import make_actor, rank_device

LAYOUTS: dict[str, tuple[str, int, dict[str, Any], list[int]]] = {
    # family, ranks, layout, ranks that read: the first copy of each parameter.
    "dp2": ("qwen2", 2, {}, [0]),
    "cp2": ("qwen2", 2, {"cp": 2}, [0]),
    "tp2-dp2": ("qwen2", 4, {"tp": 2}, [0, 1]),
    "ep2-dp4": ("qwen3_moe", 4, {"ep": 2}, [0, 1]),
    "tp2-ep2-etp1": ("qwen3_moe", 4, {"tp": 2, "ep": 2}, [0, 1]),
}


class _FailsLater(SafetensorsSource):
    """A disk that breaks after some reads."""

    reads = 0

    def read(self, block: Any) -> torch.Tensor:
        self.reads += 1
        if self.reads > 4:
            raise OSError("the disk is gone")
        return super().read(block)


def _load(rank: int, world: int, folder: str, layout: dict[str, Any], kind: type[SafetensorsSource]) -> Any:
    """(whether this rank opened a source, every tensor of the model) or the error."""
    from megatron_rl.mcore import build, convert, cpu
    from megatron_rl.parallel import groups

    cpu.install()
    actor = make_actor(**layout)
    groups.init_model_parallel(topology_of(actor, world), actor.vpp)
    model = build.build_model(read_model_shape(folder), actor, "float32", rank_device())
    for chunk in model.chunks:
        for param in chunk.parameters():
            param.data.fill_(float("nan"))
    opened: list[str] = []

    def open_source() -> SafetensorsSource:
        opened.append(folder)
        return kind(folder)

    try:
        convert.load_hf(model, open_source)
    except CheckpointError as error:
        return str(error)
    return bool(opened), {name: tensor.clone() for name, tensor in convert.export_hf(model)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_copy_reads_and_all_copies_are_equal(tmp_path: Path, name: str) -> None:
    family, world, layout, readers = LAYOUTS[name]
    folder = save_tiny(tmp_path / "model", family, layers=2, tied=False)
    wanted = load_file(f"{folder}/model.safetensors")
    results = run_ranks(world, _load, folder, layout, SafetensorsSource)
    assert [rank for rank, (opened, _) in enumerate(results) if opened] == readers
    for rank, (_, exported) in enumerate(results):
        assert exported.keys() == wanted.keys()
        assert [key for key, tensor in exported.items() if not torch.equal(tensor, wanted[key])] == [], rank


def test_what_a_reader_meets_is_raised_on_all_ranks(tmp_path: Path) -> None:
    """A disk that breaks on the way, and a torn file: the others neither wait nor go on with what they have."""
    folder = save_tiny(tmp_path / "model", layers=2)
    assert run_ranks(2, _load, folder, {}, _FailsLater) == ["the disk is gone"] * 2
    file = Path(folder) / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    errors = run_ranks(2, _load, folder, {}, SafetensorsSource)
    assert len(set(errors)) == 1 and "not a complete safetensors file" in errors[0]
