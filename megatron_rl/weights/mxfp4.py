"""Experts in 4-bit floats with a scale for 32 numbers (MXFP4, Open Compute Project 2023), as gpt-oss is published.

Of a stack X, `X_blocks` [experts, out, groups, 16] has two numbers in a byte, the first one in its lower half;
`X_scales` [experts, out, groups] has a power of two for each group, 127 above its exponent. What is read is their
product, which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.stacks import member_of, members_of
from megatron_rl.models.weight_files import Header
from megatron_rl.weights.fp8 import ENTRY
from megatron_rl.weights.safetensors import SafetensorsSource

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_HALVES, *(-value for value in _HALVES))
"""What each of the 16 forms of 4 bits means"""
_BIAS = 127


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that experts are stored so."""
    entry: object = config.get(ENTRY)
    return isinstance(entry, dict) and cast("dict[str, Any]", entry).get("quant_method") == "mxfp4"


@dataclass(frozen=True)
class _Packed:
    """The two tensors of a stack."""

    blocks: Header
    scales: Header


class Mxfp4Source(SafetensorsSource):
    """The weights of a folder with packed experts, dequantized; other tensors are read as they are.

    Raises CheckpointError that names scales and blocks which do not fit each other.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        stored = self._tensors
        self._packed: dict[str, _Packed] = {}
        tensors, faults = dict(stored), list[str]()
        for name in stored:
            stack = name.removesuffix(_BLOCKS)
            scales = stored.get(stack + _SCALES)
            if stack == name or scales is None:
                continue
            one = _Packed(tensors.pop(name), tensors.pop(stack + _SCALES))
            shape = one.blocks.shape
            fits = len(shape) == 4 and shape[3] == _GROUP // 2 and scales.shape == shape[:3]
            if not fits or {one.blocks.dtype, scales.dtype} != {"U8"}:
                faults.append(
                    f"{name} is {one.blocks.dtype} {list(shape)}, its scales {scales.dtype} {list(scales.shape)}"
                )
                continue
            self._packed[stack] = one
            experts, rows, groups, _ = shape
            members = members_of(stack, (experts, groups * _GROUP, rows))
            tensors |= {member: Header("BF16", size, one.blocks.file) for member, size in members.items()}
        if faults:
            raise CheckpointError(f"{self.path}: packed experts do not fit their scales: {first_of(faults, 20, '; ')}")
        self._tensors = tensors

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        member = member_of(block.hf_name)
        packed = None if member is None else self._packed.get(member.stack)
        if member is None or packed is None or block.cols is None:
            return super().read(block)
        first, end = block.cols[0] // _GROUP, -(-block.cols[1] // _GROUP)
        part = (slice(member.number, member.number + 1), slice(*block.rows), slice(first, end))
        blocks = self._opened(packed.blocks.file, packed.blocks.num_bytes(1))
        codes = blocks.get_slice(member.stack + _BLOCKS)[part][0].int()
        scales = self._opened(packed.scales.file, packed.scales.num_bytes(1)).get_slice(member.stack + _SCALES)
        exponents = scales[part][0].int()
        values = torch.tensor(_VALUES)[torch.stack([codes & 0x0F, codes >> 4], dim=-1)].flatten(-2)
        values = torch.ldexp(values, (exponents - _BIAS)[..., None]).flatten(-2)
        start = block.cols[0] - first * _GROUP
        return values[:, start : start + block.cols[1] - block.cols[0]].bfloat16()
