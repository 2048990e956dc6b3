"""What is converted: a model in Hugging Face's names and shapes, whatever its files are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import inspect_fields, read_config
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import constants, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.weights.companions import copy_companions
from megatron_rl.weights.fp8 import ENTRY, BlockScaledSource, block_size
from megatron_rl.weights.mxfp4 import Mxfp4Source, is_mxfp4
from megatron_rl.weights.safetensors import SafetensorsSource, WeightSource


class ModelSource(WeightSource, Protocol):
    """A source of weights that knows their precision before they are read."""

    def dtype(self, name: str) -> torch.dtype:
        """The precision that `read` gives a tensor's numbers in."""
        ...


@dataclass(frozen=True)
class Conversion:
    """A model to convert, checked: its weights are those that its config says."""

    what: str
    """Where it comes from, for a reader."""
    weights: ModelSource
    shape: ModelShape
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor -> its shape, in the order in which they are written."""
    config: Mapping[str, Any]
    """The config.json that belongs to the output."""
    companions: Callable[[Path], None]
    """Writes the model's other files (tokenizer, generation config) into a folder."""
    files: Sequence[Path]
    """What is read, by which a broken-off conversion knows whether it is of the same model."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the output."""
    dtype: torch.dtype | None = None
    """The precision of the output if none is asked for; that of each tensor if this is None too."""


def precisions(conversion: Conversion, asked: torch.dtype | None) -> dict[str, torch.dtype]:
    """Tensor -> its precision in the output. asked: None leaves the choice to the source. What is float32 in a model of
    any precision (a router's bias, models/rules.py) is so here, unless each tensor keeps its own.
    """
    dtype, shape = asked or conversion.dtype, conversion.shape
    if dtype is None:
        return {name: conversion.weights.dtype(name) for name in conversion.shapes}
    float32 = constants(shape, FAMILIES[shape.architecture])
    return {name: torch.float32 if name in float32 else dtype for name in conversion.shapes}


def from_hf(folder: Path) -> Conversion:
    """A Hugging Face folder. Raises CheckpointError with every fault of its config and its weights."""
    config, faults = read_config(str(folder), "the source")
    block, packed = block_size(config or {}), is_mxfp4(config or {})
    notes: tuple[str, ...] = ()
    if config is not None and (block is not None or packed):
        del config[ENTRY]
        form = "4 bits (MXFP4)" if block is None else f"8 bits with scales of blocks {list(block)}"
        notes = (f"weights in {form} become bfloat16; {ENTRY} is removed",)
    shape, faults = (None, faults) if config is None else inspect_fields(config, str(folder / "config.json"))
    problems = [str(ConfigError(faults))] if faults else []
    weights: SafetensorsSource | None = None
    try:
        if packed:
            weights = Mxfp4Source(folder)
        else:
            weights = SafetensorsSource(folder) if block is None else BlockScaledSource(str(folder), block)
        if shape is not None:
            weights.check(hf_shapes(shape, FAMILIES[shape.architecture]))
    except CheckpointError as error:
        problems.append(str(error))
    if problems or shape is None or weights is None or config is None:
        raise CheckpointError("\n".join(problems))
    files = sorted({Path(weights.place(name)) for name in hf_shapes(shape, FAMILIES[shape.architecture])})
    return Conversion(
        f"Hugging Face folder {folder}",
        weights,
        shape,
        hf_shapes(shape, FAMILIES[shape.architecture]),
        config,
        lambda out: copy_companions(out, folder, folder, None),
        [folder / "config.json", *files],
        notes,
    )


def whole(shape: tuple[int, ...], name: str) -> Block:
    """All of a tensor."""
    return Block(name, (0, shape[0]), (0, shape[1]) if len(shape) == 2 else None)


def row_pieces(shape: tuple[int, ...], name: str, max_rows: int) -> list[Block]:
    """A tensor in blocks of at most max_rows rows."""
    cols = (0, shape[1]) if len(shape) == 2 else None
    step = max(1, max_rows)
    return [Block(name, (at, min(at + step, shape[0])), cols) for at in range(0, shape[0], step)]
