"""Rectangles of tensors in the files of torch.distributed.checkpoint (DCP), and back.

Each rank writes one file, with what it has of every tensor; `.metadata`, written by one rank when all have written,
says where each rectangle is. Nothing here is a collective: whoever calls brings the ranks' results together.
torch's own tools read these folders (torch.distributed.checkpoint.load and format_utils).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.observe.beat import beat
from megatron_rl.types import FileMark
from megatron_rl.weights.marked_files import MarkedFile, naming

METADATA = ".metadata"
WholeTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""name -> (shape, dtype) of saved tensors"""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a saved tensor, and memory for its numbers on this rank. A scalar has no offsets."""

    name: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class WrittenChunk:
    """A rectangle of a saved tensor, and where its numbers are."""

    name: str
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    place: tuple[int, int]
    """First byte and number of bytes in the file."""


@contextmanager
def _without_torchs_checksums() -> Generator[None]:
    """torch.save's own would be one more pass over what the file's mark covers."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_chunks(path: Path, chunks: Iterable[Chunk]) -> tuple[list[WrittenChunk], FileMark]:
    """One rank's file, on the disk when this returns. Tensors must lie on the CPU. Raises CheckpointError."""
    written: list[WrittenChunk] = []
    with naming(path, "written"), MarkedFile(path) as file, _without_torchs_checksums():
        for chunk in chunks:
            first = file.tell()
            try:
                # A copy: torch.save writes the whole memory that a view is of.
                beat(f"write of {chunk.name}")
                torch.save(chunk.tensor.clone(), file)
            except RuntimeError:
                if file.failure is None:
                    raise
                raise file.failure from None
            place = (first, file.tell() - first)
            written.append(WrittenChunk(chunk.name, chunk.offsets, tuple(chunk.tensor.shape), path.name, place))
        return written, file.finish()


def metadata_of(tensors: WholeTensors, written: Sequence[WrittenChunk], objects: Sequence[WrittenChunk] = ()) -> bytes:
    """What METADATA has to say of a folder: it makes the files of the ranks a checkpoint. written: by all ranks.
    objects: what is no tensor. Raises CheckpointError if the rectangles are not the tensors.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    for chunk in written:
        sizes = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.size))
        chunks[chunk.name].append(sizes)
    faults = [
        f"{name}: {count} of {prod(tensors[name][0])} numbers"
        for name, of_name in chunks.items()
        if (count := sum(prod(chunk.sizes) for chunk in of_name)) != prod(tensors[name][0])
    ]
    if faults:
        raise CheckpointError("the ranks have not written each number once: " + first_of(faults, 20, "; "))
    places = {MetadataIndex(chunk.name, chunk.offsets): _StorageInfo(chunk.file, *chunk.place) for chunk in written}
    places |= {MetadataIndex(one.name): _StorageInfo(one.file, *one.place) for one in objects}
    metadata = Metadata(
        {
            **{
                name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks[name])
                for name, (shape, dtype) in tensors.items()
            },
            **{one.name: BytesStorageMetadata() for one in objects},
        },
        planner_data={name: (name,) for name in (*tensors, *(one.name for one in objects))},
        storage_data=places,
    )
    return pickle.dumps(metadata)


class SavedTensors:
    """A folder whose files and METADATA are written."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the folder has no metadata that can be read."""
        self.folder = folder
        with naming(folder / METADATA, "read"):
            try:
                self._metadata = FileSystemReader(folder).read_metadata()
            except (pickle.UnpicklingError, EOFError, AttributeError) as error:
                raise CheckpointError(f"{folder / METADATA}: is no metadata of a checkpoint: {error}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each tensor."""
        tensors = self._metadata.state_dict_metadata
        return {name: tuple(t.size) for name, t in tensors.items() if isinstance(t, TensorStorageMetadata)}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> precision of each tensor."""
        tensors = self._metadata.state_dict_metadata
        return {name: t.properties.dtype for name, t in tensors.items() if isinstance(t, TensorStorageMetadata)}

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Fill the memory of `chunks`, reading only stored rectangles that they share numbers with, each once.
        The memory may be on any device. Raises CheckpointError.
        """
        reads: dict[str, dict[MetadataIndex, list[tuple[ReadItem, torch.Tensor]]]] = {}
        for item, target in self._items(chunks):
            file = self._metadata.storage_data[item.storage_index].relative_path
            reads.setdefault(file, {}).setdefault(item.storage_index, []).append((item, target))
        for name, of_file in reads.items():
            path = self.folder / name
            with naming(path, "read"), open(path, "rb") as file:
                for index, items in of_file.items():
                    beat(f"read of {index.fqn}")
                    info = self._metadata.storage_data[index]
                    file.seek(info.offset)
                    _fill(path, file.read(info.length), items)

    def _items(self, chunks: Sequence[Chunk]) -> Iterator[tuple[ReadItem, torch.Tensor]]:
        """Stored rectangles by what of them goes where: each with the memory that it fills."""
        by_name: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            by_name.setdefault(chunk.name, []).append(chunk)
        for name, of_name in by_name.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), name
            wanted = [ChunkStorageMetadata(torch.Size(c.offsets), c.tensor.shape) for c in of_name]
            for item in create_read_items_for_chunk_list(name, stored, wanted):
                number = item.dest_index.index
                assert number is not None, item
                yield item, _narrow(of_name[number].tensor, item.dest_offsets, item.lengths)


def _fill(path: Path, data: bytes, items: Sequence[tuple[ReadItem, torch.Tensor]]) -> None:
    """The numbers of one stored rectangle to all places that want some of them."""
    try:
        stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path}: {items[0][0].storage_index.fqn} cannot be read: {error}") from error
    # The bytes are as many as the numbers: what waits to be filled takes their place in memory.
    del data
    for item, target in items:
        target.copy_(_narrow(stored, item.storage_offsets, item.lengths))


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def tensor_differences(saved: Mapping[str, tuple[int, ...]], wanted: WholeTensors, first_kind: str) -> list[str]:
    """Saved tensors that a model lacks, and the other way round, and those of another shape; what is true of a weight
    and its moments alike is said once. saved: name -> shape.
    """
    reasons = {name: "is not in the checkpoint" for name in wanted if name not in saved}
    reasons |= {name: "is not in the model" for name in saved if name not in wanted}
    reasons |= {
        name: f"is {list(saved[name])} in the checkpoint, {list(shape)} in the model"
        for name, (shape, _) in wanted.items()
        if name in saved and saved[name] != shape
    }
    differences: list[str] = []
    for name, reason in reasons.items():
        kind, _, weight = name.partition("/")
        if weight and reasons.get(f"{first_kind}/{weight}") == reason:
            if kind == first_kind:
                differences.append(f"{weight} {reason}")
        else:
            differences.append(f"{name} {reason}")
    return differences
