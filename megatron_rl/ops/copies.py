"""Many copies in one kernel launch, for weight syncs, which repeat the same copies.

On CUDA, pairs of one dtype whose rows are 16-byte aligned are copied by one Triton kernel (copies_triton.py), which
takes its list of tiles from the device; elsewhere, and for all other pairs, torch copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

ALIGNED_TO = 16
"""Bytes that a thread moves at a time."""


class CopyBatch:
    """Copies each second tensor of the pairs into the first, on every call of run().

    Tensors of a pair have one shape and one device, dtypes may differ; no memory is written that another pair reads
    or writes. They must stay where they are: addresses are taken once.

    One side of the pairs, in all the same one, may be views on the meta device, of an untyped buffer (uint8): they
    stand for the same views of the buffer that run() gets, which may be another one each time.
    """

    def __init__(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], buffer_device: torch.device | None = None
    ) -> None:
        """buffer_device: where the buffer of views on the meta device will be."""
        fast: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._to: list[torch.Tensor] = []
        self._source: list[torch.Tensor] = []
        for to, source in pairs:
            if all(_on_cuda(one, buffer_device) for one in (to, source)) and _in_words(to, source):
                fast.append((to, source))
            else:
                self._to.append(to)
                self._source.append(source)
        self._tiles: Any = None
        if fast:
            from megatron_rl.ops import copies_triton

            # Addresses alone would not keep their memory, and a view of each piece would take more than its tiles.
            self._kept = {one.untyped_storage().data_ptr(): one.untyped_storage() for pair in fast for one in pair}
            self._tiles = copies_triton.tiles_of(fast)
            self._staged = tuple(one.is_meta for one in fast[0])

    @torch.no_grad()
    def run(self, staging: torch.Tensor | None = None) -> None:
        """Queued on the current stream. staging: [bytes] uint8, the buffer of views on the meta device."""
        if self._tiles is not None:
            from megatron_rl.ops import copies_triton

            address = 0 if staging is None else staging.data_ptr()
            to_base, source_base = (address if staged else 0 for staged in self._staged)
            copies_triton.copy_tiles(self._tiles, to_base, source_base)
        if self._to:
            to, source = self._to, self._source
            if staging is not None:
                to, source = ([_in_buffer(one, staging) for one in side] for side in (to, source))
            torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]


def _in_buffer(view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """The view of the buffer that a view on the meta device stands for; any other tensor as it is."""
    if not view.is_meta:
        return view
    return buffer.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def _on_cuda(view: torch.Tensor, buffer_device: torch.device | None) -> bool:
    device = buffer_device if buffer_device is not None and view.is_meta else view.device
    return device.type == "cuda"


def _in_words(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the kernel can copy a pair: at most two dims, each row in one piece and aligned on both sides."""
    return (
        to.dtype == source.dtype
        and to.dim() <= 2
        and all(one.stride(-1) == 1 and not any(size % ALIGNED_TO for size in _edges(one)) for one in (to, source))
    )


def _edges(view: torch.Tensor) -> tuple[int, ...]:
    """Bytes that must be multiples of ALIGNED_TO: the start, a row's length, and from row to row."""
    start = int(view.storage_offset()) * view.itemsize if view.is_meta else view.data_ptr()
    step = view.stride(0) * view.itemsize if view.dim() == 2 and len(view) > 1 else 0
    return start, view.shape[-1] * view.itemsize, step
