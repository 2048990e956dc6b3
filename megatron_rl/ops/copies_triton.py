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

# Words of 8 bytes that a program moves, in steps; a thread takes two at a time.
_TILE = 16384
_STEP = 4096


@triton.jit
def _copy_kernel(table, to_base, source_base, STEP: tl.constexpr):
    entry = table + 6 * tl.program_id(0)
    to = tl.multiple_of(tl.load(entry) + to_base, 16).to(tl.pointer_type(tl.int64))
    source = tl.multiple_of(tl.load(entry + 1) + source_base, 16).to(tl.pointer_type(tl.int64))
    size = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 2)
    width = tl.multiple_of(tl.load(entry + 3).to(tl.int32), 2)
    to_stride, source_stride = tl.load(entry + 4), tl.load(entry + 5)
    for start in range(0, size, STEP):
        at = start + tl.arange(0, STEP)
        here = at < size
        row = at // width
        col = at - row * width
        # A row has an even number of words and starts at an even one, so pairs of words stay together.
        to_at = tl.max_contiguous(tl.multiple_of(row * to_stride + col, 2), 2)
        source_at = tl.max_contiguous(tl.multiple_of(row * source_stride + col, 2), 2)
        tl.store(to + to_at, tl.load(source + source_at, mask=here), mask=here)


def tiles_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[tiles, 6] int64 on the pairs' device, for each tile of all pairs: addresses to and from, words, words of a row,
    and words from row to row on both sides. For views on the meta device, addresses count from their buffer's start.
    """
    views = [[_view(one) for one in pair] for pair in pairs]
    starts, strides = (torch.tensor([[one[place] for one in pair] for pair in views]) for place in (0, 3))
    rows, width = (torch.tensor([pair[0][place] for pair in views]) for place in (1, 2))
    # A pair without gaps on either side is one long row, which tiles cut anywhere; they cut others between rows.
    whole = (strides == width[:, None]).all(dim=1) | (rows == 1)
    words = rows * width
    rows_of_tile = (_TILE // width).clamp(min=1)
    step = torch.where(whole, torch.tensor(_TILE), rows_of_tile * width)
    ahead = torch.where(whole[:, None], torch.tensor(_TILE), rows_of_tile[:, None] * strides)
    width, strides = torch.where(whole, torch.tensor(_TILE), width), strides.masked_fill(whole[:, None], 0)
    counts = (words + step - 1) // step
    pair = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    number = torch.arange(len(pair)) - (counts.cumsum(0) - counts)[pair]
    sizes = torch.minimum(words[pair] - number * step[pair], step[pair])
    addresses = starts[pair] + 8 * number[:, None] * ahead[pair]
    table = torch.cat([addresses, sizes[:, None], width[pair][:, None], strides[pair]], dim=1)
    return table.to(next(one.device for one in pairs[0] if not one.is_meta))


def _view(one: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, rows, words of a row, words from row to row."""
    start = int(one.storage_offset()) * one.itemsize if one.is_meta else one.data_ptr()
    width = one.shape[-1] * one.itemsize // 8
    rows, stride = (len(one), one.stride(0) * one.itemsize // 8) if one.dim() == 2 else (1, width)
    return start, rows, width, stride


def copy_tiles(tiles: torch.Tensor, to_base: int = 0, source_base: int = 0) -> None:
    """Copy all of them. to_base, source_base: added to the addresses of each side."""
    with torch.cuda.device(tiles.device):
        _copy_kernel[(tiles.shape[0],)](tiles, to_base, source_base, STEP=_STEP, num_warps=8)  # pyright: ignore[reportIndexIssue]
