"""Checkpoints as whole tensors, for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.weights.dcp import Chunk, SavedTensors


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model's folder in a checkpoint, whole."""
    saved = SavedTensors(folder)
    chunks = [
        Chunk(name, (0,) * len(shape), torch.zeros(shape, dtype=torch.float32 if shape else torch.int64))
        for name, shape in saved.shapes.items()
    ]
    saved.read(chunks)
    return {chunk.name: chunk.tensor for chunk in chunks}


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same to the bit. Both must have the same names."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
