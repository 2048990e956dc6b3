"""Weights in 8-bit floats with a scale for each block, as DeepSeek-V3 is published (DeepSeek-AI 2024, section 3.3).

A matrix `X.weight` is stored in float8_e4m3fn; `X.weight_scale_inv` has a number for each block of it (128 x 128), and
the weight is their product. What is read is that product in bfloat16, as DeepSeek's own conversion makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.weights.safetensors import SafetensorsSource

ENTRY = "quantization_config"
_SCALE = "_scale_inv"
_STORED = "F8_E4M3"


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) of a block if config.json says that weights are stored so; None if it says anything else."""
    entry: object = config.get(ENTRY)
    if not isinstance(entry, dict):
        return None
    of = cast("dict[str, Any]", entry)
    size: object = of.get("weight_block_size")
    if of.get("quant_method") != "fp8" or of.get("fmt", "e4m3") != "e4m3" or not isinstance(size, list):
        return None
    rows, cols = cast("list[int]", size)
    return rows, cols


class BlockScaledSource(SafetensorsSource):
    """The weights of a folder with block scales, dequantized; tensors that are not in 8 bits are read as they are."""

    def __init__(self, path: str, block: tuple[int, int]) -> None:
        super().__init__(path)
        self._block = block
        self._scaled = {name for name, one in self._tensors.items() if one.dtype == _STORED} & {
            name.removesuffix(_SCALE) for name in self._tensors if name.endswith(_SCALE)
        }

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource; scales that are alone or of another shape are named too."""
        faults: list[str] = []
        stored = self._tensors
        scales = {name: one for name, one in stored.items() if name.endswith(_SCALE)}
        for name, scale in scales.items():
            weight = stored.get(name.removesuffix(_SCALE))
            if weight is None:
                faults.append(f"{name} is a scale of no tensor")
                continue
            wanted = tuple(-(-size // block) for size, block in zip(weight.shape, self._block, strict=True))
            if weight.dtype != _STORED or scale.shape != wanted or scale.dtype != "F32":
                of = f"of a tensor that is {weight.dtype} {list(weight.shape)}"
                faults.append(f"{name} is {scale.dtype} {list(scale.shape)}, {of}")
        if faults:
            raise CheckpointError(f"{self.path}: block scales do not fit: {first_of(faults, 20, '; ')}")
        try:
            # A weight in 8 bits without a scale is refused by its dtype.
            self._tensors = {
                name: replace(one, dtype="BF16") if name in self._scaled else one
                for name, one in stored.items()
                if name not in scales
            }
            super().check(expected)
        finally:
            self._tensors = stored

    def dtype(self, name: str) -> torch.dtype:
        """The precision that `read` gives."""
        return torch.bfloat16 if name in self._scaled else super().dtype(name)

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        values = super().read(block)
        if block.hf_name not in self._scaled or block.cols is None:
            return values
        name = block.hf_name + _SCALE
        first, size = (block.rows[0], block.cols[0]), self._block
        ends = (block.rows[1], block.cols[1])
        spans = [(start // of, -(-end // of)) for start, end, of in zip(first, ends, size, strict=True)]
        scales = super().read(Block(name, spans[0], spans[1]))
        for dim, of in enumerate(size):
            start = first[dim] - spans[dim][0] * of
            scales = scales.repeat_interleave(of, dim).narrow(dim, start, values.shape[dim])
        return (values.float() * scales).bfloat16()
