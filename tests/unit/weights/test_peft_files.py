"""Adapters in files: what is refused by name, and what they begin as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import CheckpointError
from megatron_rl.models.layouts import Block
from megatron_rl.models.lora import Adapters
from megatron_rl.weights.base_digest import weights_digest
from megatron_rl.weights.peft_files import AdapterFile, NewAdapters, write_adapter

ADAPTERS = Adapters(2, 4.0, 0.0, frozenset({"q_proj"}))
A, B = (f"model.layers.0.self_attn.q_proj.lora_{one}.weight" for one in "AB")
SHAPES = {A: (2, 6), B: (4, 2)}


def write(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    write_adapter(folder, tensors.items(), ADAPTERS, "base")
    return tensors


def test_what_is_written_is_read_again_by_blocks(tmp_path: Path) -> None:
    tensors = write(tmp_path / "adapter")
    source = AdapterFile(tmp_path / "adapter")
    source.check(SHAPES)
    assert torch.equal(source.read(Block(B, (1, 3), (0, 2))), tensors[B][1:3])
    assert torch.equal(source.read(Block(A, (0, 2), (3, 6))), tensors[A][:, 3:])
    again = write(tmp_path / "adapter")
    assert torch.equal(AdapterFile(tmp_path / "adapter").read(Block(A, (0, 2), (0, 6))), again[A])
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"], "nothing is left beside it"


def test_missing_surplus_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    source = AdapterFile(tmp_path)
    other = {A: (3, 6), "model.layers.1.self_attn.q_proj.lora_A.weight": (2, 6)}
    with pytest.raises(CheckpointError) as caught:
        source.check(other)
    text = str(caught.value)
    assert "missing model.layers.1" in text and f"surplus {B}" in text and f"{A} is [2, 6]" in text
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        AdapterFile(tmp_path)
    with pytest.raises(CheckpointError, match="there is no"):
        AdapterFile(tmp_path / "none")


def test_new_adapters_are_alike_in_all_blocks_and_add_nothing() -> None:
    source = NewAdapters(3)
    source.check(SHAPES)
    whole = source.read(Block(A, (0, 2), (0, 6)))
    assert torch.equal(source.read(Block(A, (0, 2), (2, 4))), whole[:, 2:4])
    assert 0 < float(whole.abs().max()) <= 6**-0.5
    assert not bool(source.read(Block(B, (0, 4), (0, 2))).any())


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(300_000, dtype=torch.float32)}, str(file))
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first
    save_file({"w": load_file(file)["w"] + 1}, str(file))
    assert weights_digest(tmp_path) != first
