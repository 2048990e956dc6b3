"""Many copies in one kernel launch, for weight syncs, which repeat the same copies.

On CUDA, pairs of one dtype whose memory is in one piece and 16-byte aligned are copied by one Triton kernel
(copies_triton.py), which takes its list of tiles from the device; elsewhere, and for all other pairs, torch copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ALIGNED_TO = 16
"""Bytes that a thread moves at a time."""


class CopyBatch:
    """Copies each second tensor of the pairs into the first, on every call of run().

    Tensors of a pair have one shape and one device, dtypes may differ; no memory is written that another pair reads
    or writes. They must stay where they are: addresses are taken once.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        fast = [pair for pair in pairs if _in_one_piece(*pair)]
        slow = [pair for pair in pairs if not _in_one_piece(*pair)]
        self._to, self._source = [to for to, _ in slow], [source for _, source in slow]
        # Addresses alone would not keep their memory.
        self._kept = fast
        self._tiles: Any = None
        if fast:
            from megatron_rl.ops import copies_triton

            self._tiles = copies_triton.tiles_of(fast)

    @torch.no_grad()
    def run(self) -> None:
        """Queued on the current stream."""
        if self._tiles is not None:
            from megatron_rl.ops import copies_triton

            copies_triton.copy_tiles(self._tiles)
        if self._to:
            torch._foreach_copy_(self._to, self._source)  # pyright: ignore[reportPrivateImportUsage]


def _in_one_piece(to: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        to.is_cuda
        and to.dtype == source.dtype
        and to.is_contiguous()
        and source.is_contiguous()
        and not any(one % ALIGNED_TO for one in (to.data_ptr(), source.data_ptr(), to.nbytes))
    )
