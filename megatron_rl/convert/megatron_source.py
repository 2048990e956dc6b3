"""Models of Megatron's side: run checkpoints of `megatron-rl train`, torch_dist checkpoints, mp_rank folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from megatron_rl.convert.classic import ClassicSource, rank_folders
from megatron_rl.convert.source import Conversion, ModelSource, from_hf
from megatron_rl.convert.torch_dist import COMPANIONS, TorchDistSource, checkpoint_folder
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.messages import first_of
from megatron_rl.models import FAMILIES
from megatron_rl.models.changes import laid_over
from megatron_rl.models.config_json import inspect_fields, inspect_model
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import constants, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.weights.companions import copy_companions
from megatron_rl.weights.dcp import METADATA, Chunk, SavedTensors, tensor_differences
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.weights.safetensors import RandomSource, SafetensorsSource, WeightSource

_WEIGHTS = "param"
_STATE, _ACTOR = "state.json", "actor"


class RunSource:
    """The float32 masters of a model in a checkpoint of `megatron-rl train`, in Hugging Face's names and shapes."""

    def __init__(self, folder: Path, expected: Mapping[str, tuple[int, ...]], constant: WeightSource | None) -> None:
        """expected: shapes of what is trained. constant: has what is not, and is therefore in no checkpoint."""
        self._saved, self._trained, self._constant = SavedTensors(folder), expected, constant
        of = {name: shape for name, shape in self._saved.shapes.items() if name.startswith(f"{_WEIGHTS}/")}
        wanted = {f"{_WEIGHTS}/{name}": (shape, torch.float32) for name, shape in expected.items()}
        differences = tensor_differences(of, wanted, _WEIGHTS)
        if differences:
            raise CheckpointError(f"{folder}: is of another model than config.json: {first_of(differences, 20, '; ')}")

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource; __init__ has looked."""

    def dtype(self, name: str) -> torch.dtype:
        """See ModelSource."""
        return torch.float32

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        if block.hf_name not in self._trained:
            assert self._constant is not None
            return self._constant.read(block).float()
        cols = () if block.cols is None else (block.cols[1] - block.cols[0],)
        values = torch.empty((block.num_rows, *cols))
        offsets = (block.rows[0],) if block.cols is None else (block.rows[0], block.cols[0])
        self._saved.read([Chunk(f"{_WEIGHTS}/{block.hf_name}", offsets, values)])
        return values

    def place(self, name: str) -> str:
        """See WeightSource."""
        return str(self._saved.folder)


def from_megatron(path: Path, hf: Path | None) -> Conversion:
    """The model of a folder of any of the three kinds, or of a Hugging Face folder.

    hf: the Hugging Face folder that a checkpoint's model is of, with its config and tokenizer; not needed if the
    checkpoint has them, or names them.

    Raises CheckpointError with every fault.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    if (path / "config.json").is_file():
        return from_hf(path)
    if (path / _STATE).is_file() and (path / _ACTOR / METADATA).is_file():
        return _of_run(path, hf)
    ranks = rank_folders(path)
    folder = checkpoint_folder(path)
    if folder is None and not ranks:
        raise CheckpointError(
            f"{path}: is no checkpoint of megatron-rl train (state.json, {_ACTOR}/), no torch_dist checkpoint "
            f"({METADATA}, or latest_checkpointed_iteration.txt beside it) and has no mp_rank_* folders"
        )
    hf = hf or path / COMPANIONS
    if not hf.is_dir():
        raise CheckpointError(
            f"{path}: has no folder {COMPANIONS} with config.json and tokenizer -- name the model's Hugging Face "
            "folder (--hf DIR)"
        )
    shape = _shape(hf)
    if folder is not None:
        weights: ModelSource = TorchDistSource(folder, shape)
        files = [folder / METADATA, *sorted(folder.glob("*.distcp"))]
        return _conversion(f"torch_dist checkpoint {folder}", weights, shape, hf, files, None)
    source = ClassicSource(ranks, shape)
    return _conversion(f"Megatron checkpoint {path}", source, shape, hf, list(ranks.values()), None)


def _of_run(path: Path, hf: Path | None) -> Conversion:
    state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
    model = cast("dict[str, Any]", state.get("config", {}).get("model", {}))
    if (model.get("lora") or {}).get("rank"):
        text = "is of adapters (model.lora), which are no model -- megatron-rl export CONFIG --checkpoint PATH --merge"
        raise CheckpointError(f"{path}: {text}")
    folder = hf or Path(str(model.get("path", "")))
    if not folder.is_dir():
        raise CheckpointError(
            f"{path}: the run's model.path {str(folder)!r} is not there -- name the folder with its config and "
            "tokenizer (--hf DIR)"
        )
    config = laid_over(_config(folder), model.get("override_config") or {})
    shape, faults = inspect_fields(config, str(folder / "config.json"))
    if shape is None:
        raise CheckpointError(str(ConfigError(faults)))
    family = FAMILIES[shape.architecture]
    shapes, constant = hf_shapes(shape, family), constants(shape, family)
    source: WeightSource | None = None
    if constant:
        # As the run has them (workers/model.py): no update changes them.
        drawn = RandomSource(0, shape.initializer_range)
        source = drawn if model.get("init") == "random" else SafetensorsSource(folder)
        source.check(shapes)
    trained = {name: size for name, size in shapes.items() if name not in constant}
    weights = RunSource(path / _ACTOR, trained, source)
    files = [path / _STATE, *sorted((path / _ACTOR).iterdir())]
    dtype = DTYPES.get(str(model.get("dtype")))
    made = _conversion(f"run checkpoint {path}", weights, shape, folder, files, dtype)
    tokenizer = folder if hf is not None else Path(str(model.get("tokenizer_path") or folder))
    return replace(
        made, config=config, notes=_notes(state), companions=lambda out: copy_companions(out, folder, tokenizer, None)
    )


def _notes(state: Mapping[str, Any]) -> tuple[str, ...]:
    """What the run says of its tokenizer that is not in the output."""
    config = state.get("config", {})
    changed = [f"model.{key}" for key in ("eos_token", "chat_template") if config.get("model", {}).get(key) is not None]
    template = config.get("data", {}).get("chat_template")
    changed += ["data.chat_template"] if template not in (None, "tokenizer") else []
    return (f"the run's {', '.join(changed)}: not in the output; megatron-rl export writes them",) if changed else ()


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _shape(hf: Path) -> ModelShape:
    shape, faults = inspect_model(str(hf), "the Hugging Face folder")
    if shape is None:
        raise CheckpointError(str(ConfigError(faults)))
    return shape


def _conversion(
    what: str, weights: ModelSource, shape: ModelShape, hf: Path, files: list[Path], dtype: torch.dtype | None
) -> Conversion:
    shapes = hf_shapes(shape, FAMILIES[shape.architecture])
    return Conversion(
        what,
        weights,
        shape,
        shapes,
        _config(hf),
        lambda out: copy_companions(out, hf, hf, None),
        [hf / "config.json", *files],
        dtype=dtype,
    )
