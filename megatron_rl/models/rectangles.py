"""A flat range of a local parameter as rectangles of Hugging Face tensors. Pure integers.

The distributed optimizer deals parameters to data-parallel ranks as flat ranges, which begin and end within rows. A
checkpoint holds rectangles of whole tensors.

Example: a parameter [4, 3] that is rows 8:12 of tensor w. Its flat range 2:11 is
    w rows 8:9 cols 2:3, rows 9:11 cols 0:3, rows 11:12 cols 0:2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam

Span = tuple[int, int]
"""[first, end) of a parameter's numbers in row-major order"""


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a Hugging Face tensor. Its numbers are in the local parameter from `start` on, row by row."""

    hf_name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """One past its last number in the parameter."""
        return self.start + prod(self.sizes)


def rectangles(param: LocalParam, span: Span, most: int | None = None) -> Iterator[Rectangle]:
    """The rectangles of a range, in order: at most three of a block, more where `most` numbers are the limit of one.
    Padding is in none.
    """
    width = param.width
    rows_of_one = max(1, most // width) if most else param.num_rows
    row = 0
    for block in param.blocks:
        first, end = row * width, (row + block.num_rows) * width
        inside = (max(span[0], first) - first, min(span[1], end) - first)
        for start, stop in _cuts(inside, width, rows_of_one * width):
            yield _rectangle(block, first, start, stop, width)
        row += block.num_rows


def _cuts(span: Span, width: int, most: int) -> Iterator[Span]:
    """A range cut so that each part is of one row or of whole rows. most: numbers of a part, a multiple of width."""
    at, end = span
    while at < end:
        in_row, to_row_end = at % width, width - at % width
        whole = min(most, (end - at) // width * width)
        stop = at + whole if not in_row and whole else min(end, at + to_row_end)
        yield at, stop
        at = stop


def _rectangle(block: Block, first: int, start: int, stop: int, width: int) -> Rectangle:
    row, col = divmod(start, width)
    rows = max(1, (stop - start) // width)
    top = block.rows[0] + row
    if block.cols is None:
        return Rectangle(block.hf_name, (top,), (rows,), first + start)
    cols = min(stop - start, width)
    return Rectangle(block.hf_name, (top, block.cols[0] + col), (rows, cols), first + start)


def padding(param: LocalParam, span: Span) -> Span:
    """The numbers of a range that are padding; an empty range where none are."""
    end = sum(block.num_rows for block in param.blocks) * param.width
    return (max(span[0], end), max(span[1], end))


def even_part(span: Span, index: int, count: int) -> Span:
    """Part `index` of a range cut into `count` parts of equal size, give or take one."""
    first, size = span[0], span[1] - span[0]
    return first + size * index // count, first + size * (index + 1) // count


def place_among_copies(shards: Sequence[LocalParam], rank: int) -> tuple[int, int]:
    """Which of the ranks that hold the same part of a parameter `rank` is, and how many those are.

    shards: the parameter as each rank of its group holds it.
    """
    copies = [number for number, shard in enumerate(shards) if shard.blocks == shards[rank].blocks]
    return copies.index(rank), len(copies)
