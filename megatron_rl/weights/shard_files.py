"""Files of safetensors whose contents are known before the first byte: their header comes first, tensors follow piece
by piece. So a file is never in memory, and its checksum is made while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron_rl.models.weight_files import SINGLE_NAME
from megatron_rl.observe.beat import beat
from megatron_rl.types import FileMark
from megatron_rl.weights.marked_files import MarkedFile, naming

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Precision -> its name in a header."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: what its header says of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.dtype.itemsize


Files = Mapping[str, Sequence[TensorEntry]]
"""file -> the tensors in it, in their order"""


def cut_to_size(entries: Iterable[TensorEntry], max_bytes: int) -> list[tuple[TensorEntry, ...]]:
    """The entries in their order, cut into files of at most max_bytes; a larger tensor has a file of its own."""
    files: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.num_bytes
    return [tuple(file) for file in files]


def shard_names(count: int) -> list[str]:
    """The names of a model's files, as transformers gives them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_of(files: Files) -> bytes:
    """The index of several files: tensor -> its file, and the bytes of all."""
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


class ShardFile:
    """A new file; its tensors are appended in the order of `entries`, each at once or in pieces of whole rows."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        # Readers map the numbers as they lie: wider ones first, so that each tensor begins at a multiple of its width.
        self.entries = tuple(sorted(entries, key=lambda entry: -entry.dtype.itemsize))
        self._ends = list[int]()
        self._file = MarkedFile(path)
        self._file.write(self._header())
        self._start = self._file.tell()

    def _header(self) -> bytes:
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in self.entries:
            place = [at, at + entry.num_bytes]
            fields[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": place,
            }
            at += entry.num_bytes
            self._ends.append(at)
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def append(self, entry: TensorEntry, piece: torch.Tensor) -> None:
        """The next numbers of the file, which are of `entry`: on the CPU, in its precision."""
        at, end = self._file.tell() - self._start, self._ends[self.entries.index(entry)]
        size = piece.numel() * piece.element_size()
        assert piece.dtype == entry.dtype and end - entry.num_bytes <= at and at + size <= end, (entry, at, size)
        self._file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> FileMark:
        """Have the file on the disk, and close it; its size and checksum."""
        assert self._file.tell() - self._start == (self._ends[-1] if self._ends else 0), "numbers are missing"
        try:
            return self._file.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()


def write_files(folder: Path, files: Files, tensor_of: Callable[[TensorEntry], torch.Tensor]) -> None:
    """Files of whole tensors, one after another, on the disk when this returns. tensor_of: is asked for each of them
    once, and gives it on the CPU. Raises CheckpointError that names the file which cannot be written.
    """
    for name, entries in files.items():
        path = folder / name
        with naming(path, "written"), closing(ShardFile(path, entries)) as file:
            for entry in file.entries:
                beat(f"write of {entry.name}")
                file.append(entry, tensor_of(entry))
            file.finish()
