"""A Hugging Face folder from any source: files of a size, each tensor written piece by piece."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.convert.source import Conversion, precisions, row_pieces
from megatron_rl.convert.staging import Staging
from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.stacks import by_stack, stacked_shapes
from megatron_rl.observe.progress import Advance
from megatron_rl.weights.marked_files import naming, write_file
from megatron_rl.weights.safetensors import INDEX_NAME, is_finite
from megatron_rl.weights.shard_files import ShardFile, TensorEntry, cut_to_size, index_of, shard_names

_PIECE_BYTES = 64 << 20
_BAD = "not_finite"


@dataclass(frozen=True)
class HfPlan:
    """Which tensors go into which file, and in which precision."""

    files: Mapping[str, tuple[TensorEntry, ...]]
    config: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entries in self.files.values() for entry in entries)


def plan_hf(conversion: Conversion, dtype: torch.dtype | None, shard_bytes: int) -> HfPlan:
    """The files of a model. dtype: None leaves the choice to the source."""
    kinds = precisions(conversion, dtype)
    first = {stack: names[0] for stack, names in by_stack(conversion.shapes)}
    entries = [
        TensorEntry(name, shape, kinds[first[name]]) for name, shape in stacked_shapes(conversion.shapes).items()
    ]
    files = cut_to_size(entries, shard_bytes)
    by_bytes: Counter[torch.dtype] = Counter()
    for entry in entries:
        by_bytes[entry.dtype] += entry.num_bytes
    config = dict(conversion.config)
    named = str(by_bytes.most_common(1)[0][0]).removeprefix("torch.")
    if (config.get("dtype") or config.get("torch_dtype")) != named:
        config.pop("torch_dtype", None)
        config["dtype"] = named
    return HfPlan(dict(zip(shard_names(len(files)), files, strict=True)), config)


def write_hf(conversion: Conversion, plan: HfPlan, staging: Staging, advance: Advance) -> None:
    """Write what is not there yet. advance: takes the bytes of each piece.

    Raises CheckpointError that names every tensor with numbers that are not finite, in the output's precision.
    """
    for name, entries in plan.files.items():
        if name in staging.records:
            advance(sum(entry.num_bytes for entry in entries))
            continue
        bad: set[str] = set()
        path = staging.partial(name)
        with naming(path, "written"), closing(ShardFile(path, entries)) as file:
            for entry, piece in pieces(conversion, file.entries):
                if not is_finite(piece):
                    bad.add(entry.name)
                file.append(entry, piece)
                advance(piece.numel() * piece.element_size())
            mark = file.finish()
        staging.complete(name, mark, **{_BAD: sorted(bad)})
    refuse_bad(conversion, staging)
    if len(plan.files) > 1:
        write_file(staging.folder / INDEX_NAME, index_of(plan.files))
    write_companions(conversion, plan.config, staging.folder)


def pieces(conversion: Conversion, entries: Iterable[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The files' numbers in order, some rows at a time, in the precision of the output."""
    for entry, block in _blocks(conversion, entries):
        piece = conversion.weights.read(block).to(entry.dtype)
        yield entry, piece if block.hf_name == entry.name else piece.t()


def _blocks(conversion: Conversion, entries: Iterable[TensorEntry]) -> Iterator[tuple[TensorEntry, Block]]:
    """What to read for each of the files' tensors; of a stack, one expert after another."""
    members = dict(by_stack(conversion.shapes))
    for entry in entries:
        names = members.get(entry.name, [entry.name])
        for name in names:
            shape = conversion.shapes[name]
            row_bytes = max(1, entry.num_bytes // len(names) // shape[0])
            # An expert is turned round, so that all of it is read.
            most = shape[0] if name != entry.name else _PIECE_BYTES // row_bytes
            yield from ((entry, block) for block in row_pieces(shape, name, most))


def refuse_bad(conversion: Conversion, staging: Staging) -> None:
    """Raise CheckpointError if a file has numbers that are not finite, and remove the folder."""
    bad = [name for record in staging.records.values() for name in record.get(_BAD, ())]
    if bad:
        staging.discard()
        raise CheckpointError(
            f"{conversion.what}: {len(bad)} tensors hold numbers that are not finite in the precision of the output: "
            f"{first_of(bad, 20)} -- repair the source, or choose --dtype bfloat16 or float32 if it is float16's range"
        )


def write_companions(conversion: Conversion, config: Mapping[str, Any], folder: Path) -> None:
    """The files beside the weights."""
    with naming(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        conversion.companions(folder)
        path = folder / "config.json"
        if not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != config:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def compare(
    conversion: Conversion, entries: list[TensorEntry], read: Callable[..., torch.Tensor], advance: Advance
) -> None:
    """Read source and output again. Raises CheckpointError that names each tensor that is not bit-equal."""
    differing: dict[str, None] = {}
    for entry, block in _blocks(conversion, entries):
        piece = conversion.weights.read(block).to(entry.dtype)
        written = read(block)
        if written.dtype != piece.dtype or not torch.equal(_bits(written), _bits(piece)):
            differing[entry.name] = None
        advance(piece.numel() * piece.element_size())
    if differing:
        raise CheckpointError(
            f"{len(differing)} tensors of the output are not those of {conversion.what}: {first_of(differing, 20)}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: -0 is not 0, and NaN is NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
