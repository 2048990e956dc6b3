"""The kernel of copies.py: one program a tile, addresses from a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.errors import MissingDependency

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency("weight syncs on CUDA need triton -- pip install triton") from error

# Words of 8 bytes in a tile; a thread takes two at a time.
_TILE = 4096


@triton.jit
def _copy_kernel(table, TILE: tl.constexpr):
    row = table + 3 * tl.program_id(0)
    to = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(tl.int64))
    source = tl.multiple_of(tl.load(row + 1), 16).to(tl.pointer_type(tl.int64))
    size = tl.multiple_of(tl.load(row + 2), 2)
    at = tl.arange(0, TILE)
    here = at < size
    tl.store(to + at, tl.load(source + at, mask=here), mask=here)


def tiles_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[tiles, 3] int64 on the pairs' device: addresses to and from, and words, of each tile of all pairs."""
    sizes = torch.tensor([to.nbytes // 8 for to, _ in pairs])
    starts = torch.tensor([[to.data_ptr(), source.data_ptr()] for to, source in pairs])
    counts = (sizes + _TILE - 1) // _TILE
    pair = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    first = (counts.cumsum(0) - counts)[pair]
    at = (torch.arange(len(pair)) - first) * _TILE
    words = (sizes[pair] - at).clamp(max=_TILE)
    return torch.cat([starts[pair] + 8 * at[:, None], words[:, None]], dim=1).to(pairs[0][0].device)


def copy_tiles(tiles: torch.Tensor) -> None:
    """Copy all of them."""
    with torch.cuda.device(tiles.device):
        _copy_kernel[(tiles.shape[0],)](tiles, TILE=_TILE, num_warps=8)  # pyright: ignore[reportIndexIssue]
