"""A folder of a model from whole tensors, put together as a save of one rank is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.weights.model_folder import Beside, cleared, complete, staging_of, unwritten
from megatron_rl.weights.shard_files import TensorEntry, cut_to_size, shard_names, write_files
from megatron_rl.weights.stacks import stacked


def write_model(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    companions_from: str | Path,
    tokenizer_from: str | Path | None = None,
    dtype: torch.dtype | None = None,
    config_changes: Mapping[str, Any] | None = None,
    eos_token: str | None = None,
    chat_template: str | None = None,
    verify: Callable[[Path], None] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Raises CheckpointError as a save does."""
    staging = staging_of(Path(path))
    with cleared(Path(path), staging):
        staging.mkdir(parents=True)
        held = {TensorEntry(name, tuple(tensor.shape), tensor.dtype): tensor for name, tensor in stacked(tensors)}
        of_files = cut_to_size(held, max_shard_bytes)
        files = dict(zip(shard_names(len(of_files)), of_files, strict=True))
        try:
            write_files(staging, files, held.__getitem__)
        except CheckpointError as error:
            raise unwritten(Path(path), error) from error
        beside = Beside(
            Path(companions_from),
            None if tokenizer_from is None else Path(tokenizer_from),
            dtype,
            config_changes or {},
            eos_token,
            chat_template,
            verify,
        )
        complete(Path(path), staging, files, beside)
