"""Contract W1 at the border of files: stacks of experts are taken apart, turned round and put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import CheckpointError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.stacks import stacked_shapes, unstacked_shapes
from megatron_rl.weights.safetensors import SafetensorsSource
from megatron_rl.weights.stacks import stacked
from tests.helpers.save import write_model
from tests.helpers.tiny import save_tiny

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("stacks") / "model", "gpt_oss", tied=False, layers=2))


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shape = read_model_shape(str(folder))
    return hf_shapes(shape, FAMILIES[shape.architecture])


def test_tables_and_files_have_the_same_tensors(folder: Path) -> None:
    files = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert stacked_shapes(_shapes(folder)) == files
    assert unstacked_shapes(files) == _shapes(folder)


def test_an_expert_is_read_turned_round(folder: Path) -> None:
    stored, source = load_file(folder / "model.safetensors"), SafetensorsSource(folder)
    source.check(_shapes(folder))
    part = source.read(Block(f"{LAYER}.5.gate_up_proj", (8, 20), (3, 77)))
    assert torch.equal(part, stored[f"{LAYER}.gate_up_proj"][5, 3:77, 8:20].t())
    part = source.read(Block(f"{LAYER}.7.down_proj_bias", (0, 1), (9, 12)))
    assert torch.equal(part, stored[f"{LAYER}.down_proj_bias"][7:8, 9:12])


def test_w1_a_folder_is_written_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "out", SafetensorsSource(folder).tensors(), companions_from=folder, max_shard_bytes=100_000)
    stored, written = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(file)
    assert written.keys() == stored.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in stored.items())


def test_w2_experts_that_are_missing_are_named(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored[f"{LAYER}.down_proj"] = stored[f"{LAYER}.down_proj"][:7].clone()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing {LAYER}\.7\.down_proj"):
        SafetensorsSource(tmp_path).check(_shapes(folder))
    tensors = list(SafetensorsSource(folder).tensors())
    with pytest.raises(CheckpointError, match="the experts of a layer must come together"):
        list(stacked(pair for pair in tensors if pair[0] != f"{LAYER}.3.down_proj"))
    apart = sorted(tensors, key=lambda pair: pair[0] == f"{LAYER}.7.down_proj")
    with pytest.raises(CheckpointError, match="the experts of a layer must come together"):
        list(stacked(apart))
