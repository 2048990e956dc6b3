"""Reading a Hugging Face model folder, slice by slice."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.stacks import Member, member_of
from megatron_rl.models.weight_files import INDEX_NAME, is_derived, misfit, read_weight_files, tensor_faults
from megatron_rl.weights.headers import derived_fault

_SHOWN = 20
_PRECISIONS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' name -> torch's type, of what can be loaded"""

_MAPPED_BYTES = 512 << 20
"""After so much that was read, files are opened anew: they are mapped, and their pages would stay in this process"""


class WeightSource(Protocol):
    """A source of rectangles of HF tensors."""

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError naming every tensor that is missing, surplus or misshaped."""
        ...

    def read(self, block: Block) -> torch.Tensor:
        """The block's values: [rows] or [rows, cols]."""
        ...

    def place(self, name: str) -> str:
        """Where the tensor comes from, for messages: its file."""
        ...


class _Slice(Protocol):
    """A tensor in an open file of safetensors, whose own types are not declared."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class _File(Protocol):
    """An open file of safetensors."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def opened(file: Path) -> _File:
    """A file of safetensors. Raises CheckpointError if it is not complete."""
    try:
        return cast("_File", safe_open(str(file), framework="pt"))
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a complete safetensors file ({error}); copy it again") from error


class SafetensorsSource:
    """The safetensors of a model folder, opened lazily; only the rows and columns asked for are read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = read_weight_files(self.path)
        if files.faults:
            raise CheckpointError(" | ".join(str(fault) for fault in files.faults))
        self._tensors = files.tensors
        self._handles: dict[str, _File] = {}
        self._mapped = 0

    def _handle(self, name: str, rows: int | None = None) -> _File:
        """The file of a tensor, of which so many rows (None: all) are to be read."""
        header = self._tensors[name]
        return self._opened(header.file, header.num_bytes(rows))

    def _opened(self, file: str, num_bytes: int) -> _File:
        """A file, of which so many bytes are to be read."""
        handle = self._handles.get(file) or opened(self.path / file)
        self._handles[file] = handle
        self._mapped += num_bytes
        if self._mapped > _MAPPED_BYTES:
            # The file stays mapped as long as a tensor that was read of it is in use.
            self._handles.clear()
            self._mapped = 0
        return handle

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource. A tied model's lm_head may be present when it equals the embedding, and RoPE's frequencies
        when they are those of config.json; whole numbers and 8-bit floats are refused.
        """
        faults = tensor_faults(self._tensors, expected)
        if "lm_head.weight" in self._tensors and "lm_head.weight" not in expected:
            tied = "model.embed_tokens.weight" in self._tensors
            if not tied or not torch.equal(self._whole("lm_head.weight"), self._whole("model.embed_tokens.weight")):
                faults.append("surplus lm_head.weight")
        derived = (derived_fault(name, self._whole(name), self.path) for name in self._tensors if is_derived(name))
        faults += [fault for fault in derived if fault]
        if faults:
            raise CheckpointError(f"{self.path}: {misfit(faults)}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the folder, whole, by its name; no derived buffers."""
        for name in sorted(filter(lambda name: not is_derived(name), self._tensors)):
            yield name, self._whole(name)

    def _whole(self, name: str) -> torch.Tensor:
        if member_of(name) is None:
            return self._handle(name).get_tensor(name)
        rows, cols = self._tensors[name].shape
        return self.read(Block(name, (0, rows), (0, cols)))

    def dtype(self, name: str) -> torch.dtype:
        """The precision that a tensor is stored in."""
        return _PRECISIONS[self._tensors[name].dtype]

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        member, rows = member_of(block.hf_name), slice(*block.rows)
        if member is not None:
            return self._read_member(block, member)
        view = self._handle(block.hf_name, block.num_rows).get_slice(block.hf_name)
        return view[rows] if block.cols is None else view[rows, slice(*block.cols)]

    def _read_member(self, block: Block, member: Member) -> torch.Tensor:
        assert block.cols is not None, block
        view = self._handle(block.hf_name).get_slice(member.stack)
        number, cols = slice(member.number, member.number + 1), slice(*block.cols)
        if len(view.get_shape()) == 3:
            return view[number, cols, slice(*block.rows)][0].t()
        return view[number, cols][slice(*block.rows)]

    def place(self, name: str) -> str:
        """See WeightSource."""
        return str(self.path / (self._tensors[name].file if name in self._tensors else ""))


class RandomSource:
    """Weights drawn at random: N(0, initializer_range) matrices, norms that change nothing, zero biases and sinks.

    Each tensor has a generator of its own, seeded by (seed, name): the values depend on no layout and no order.
    """

    def __init__(self, seed: int, initializer_range: float, norm: float = 1.0) -> None:
        """norm: every number of a norm's weight."""
        self._seed, self._std, self._norm = seed, initializer_range, norm
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Takes the shapes; nothing can be missing."""
        self._shapes = dict(expected)

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        shape = self._shapes[block.hf_name]
        if block.hf_name.endswith(("bias", "sinks")):
            whole = torch.zeros(shape)
        elif len(shape) == 1:
            whole = torch.full(shape, self._norm)
        else:
            # torch's CPU generator looks at 32 bits of a seed, so seed and name are mixed into as many.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{block.hf_name}".encode()))
            whole = torch.randn(shape, generator=generator) * self._std
        rows = whole[slice(*block.rows)]
        return rows if block.cols is None else rows[:, slice(*block.cols)]

    def place(self, name: str) -> str:
        """See WeightSource."""
        return "weights drawn at random"


def refuse_nonfinite(place_of: Mapping[str, str]) -> None:
    """Raise CheckpointError that names tensors which are not finite, and their files, if there are any.

    place_of: tensor -> file.
    """
    if not place_of:
        return
    by_place: dict[str, list[str]] = {}
    for name, place in place_of.items():
        by_place.setdefault(place, []).append(name)
    parts = [f"{place}: {first_of(names, _SHOWN)}" for place, names in by_place.items()]
    raise CheckpointError(
        f"{len(place_of)} tensors hold numbers that are not finite (nan, inf, or beyond the precision that they are "
        f"loaded in): {' | '.join(parts)} -- copy the folder again, or take an earlier save"
    )


def file_holding(folder: str, name: str) -> str:
    """The file of a model folder that holds a tensor; the folder where that is not known (other formats)."""
    if not any((Path(folder) / file).is_file() for file in (INDEX_NAME, "model.safetensors")):
        return folder
    return SafetensorsSource(folder).place(name)


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """[] largest magnitude, float32 or float64; NaN if one number is NaN, 0 of none. No copy of the numbers is made."""
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    # On a CPU this is 15 times as fast as vector_norm, and as isfinite().
    least, most = torch.aminmax(tensor.detach())
    return torch.maximum(least.abs(), most.abs()).to(torch.promote_types(tensor.dtype, torch.float32))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all its numbers are. Waits for its device."""
    return bool(largest(tensor).isfinite())


def finite_tensors(source: SafetensorsSource, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """source.tensors(); at the end CheckpointError names those that are not finite in `dtype`, if there are any."""
    bad: dict[str, str] = {}
    for name, tensor in source.tensors():
        if tensor.is_floating_point() and tensor.numel():
            size = float(largest(tensor))
            # Not written as size > max: no comparison holds for NaN.
            if not size <= torch.finfo(dtype).max:
                bad[name] = source.place(name)
        yield name, tensor
    refuse_nonfinite(bad)
