"""Adapters in files, in PEFT's form: adapter_config.json and adapter_model.safetensors. And adapters as they begin."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.lora import Adapters
from megatron_rl.models.peft_config import CONFIG_NAME, WEIGHTS_NAME, adapter_config
from megatron_rl.weights.companions import open_to_umask
from megatron_rl.weights.model_folder import cleared, replace_folder, staging_of
from megatron_rl.weights.safetensors import opened

PREFIX = "base_model.model."
"""What PEFT's names of tensors begin with."""


class AdapterFile:
    """The tensors of an adapter's folder (weights.safetensors.WeightSource); only what is asked for is read."""

    def __init__(self, folder: str | Path) -> None:
        """Raises CheckpointError if the file is not there, or not complete."""
        self._file = Path(folder) / WEIGHTS_NAME
        if not self._file.is_file():
            raise CheckpointError(f"{folder}: there is no {WEIGHTS_NAME}")
        self._open = opened(self._file)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource."""
        names = self._open.keys()
        held = {name.removeprefix(PREFIX): name for name in names}
        faults = [f"missing {name}" for name in expected if name not in held]
        faults += [f"surplus {name}" for name in sorted(held) if name not in expected]
        for name in sorted(expected.keys() & held.keys()):
            shape = tuple(self._open.get_slice(held[name]).get_shape())
            if shape != expected[name]:
                faults.append(f"{name} is {list(shape)}, the run's adapters have {list(expected[name])}")
        if faults:
            shown = first_of(faults, 20, "; ")
            raise CheckpointError(f"{self._file}: the adapter is not one of this model and of model.lora: {shown}")

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        assert block.cols is not None
        return self._open.get_slice(PREFIX + block.hf_name)[slice(*block.rows), slice(*block.cols)]

    def place(self, name: str) -> str:
        """See WeightSource."""
        return str(self._file)


class NewAdapters:
    """Adapters as they begin (weights.safetensors.WeightSource): A as in PEFT, uniform within 1 / sqrt(inputs), and B
    zero, so that nothing is added at first. Each tensor has a generator of its own, seeded by (seed, name): the values
    depend on no layout and no order.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Takes the shapes; nothing can be missing."""
        self._shapes = dict(expected)

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        rows, cols = self._shapes[block.hf_name]
        whole = torch.zeros(rows, cols)
        if block.hf_name.endswith(".lora_A.weight"):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{block.hf_name}".encode()))
            whole = (torch.rand((rows, cols), generator=generator) * 2 - 1) / cols**0.5
        assert block.cols is not None
        return whole[slice(*block.rows), slice(*block.cols)]

    def place(self, name: str) -> str:
        """See WeightSource."""
        return "adapters that are new"


def write_adapter_files(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], adapters: Adapters, base: str
) -> None:
    """The two files of an adapter into a folder that is there. tensors: whole, by Hugging Face's names. base: the
    folder of the model that it belongs to. Raises CheckpointError if a file cannot be written.
    """
    held = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    try:
        save_file(held, str(folder / WEIGHTS_NAME), metadata={"format": "pt"})
        text = json.dumps(adapter_config(adapters, base), indent=2) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the adapter could not be written ({error})") from error


def write_adapter(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], adapters: Adapters, base: str) -> None:
    """A folder of an adapter, which takes its place once it is whole: an earlier save stays until then. CheckpointError
    if it cannot be written.
    """
    staging = staging_of(path)
    with cleared(path, staging):
        staging.mkdir(parents=True)
        write_adapter_files(staging, tensors, adapters, base)
        open_to_umask(staging)
        replace_folder(staging, path)
