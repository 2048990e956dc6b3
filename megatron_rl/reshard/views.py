"""Views of live tensors, by the places of a plan (plan.Place)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megatron_rl.reshard.plan import BlockIndex, Place
from megatron_rl.reshard.rounds import Piece, row_size

Tensors = Mapping[str, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""(to, from): views of one shape"""


def slots_of(
    pieces: Iterable[Piece],
    message: torch.Tensor,
    dtype: torch.dtype,
    index: BlockIndex,
    tensors: Tensors,
    of_places: Callable[[list[Place]], list[Place]],
) -> Iterator[Copy]:
    """(part of the message, the same part of a parameter) for all pieces of a message, which lie end to end in it.

    message: [bytes] uint8. dtype: of the values in it. of_places: which of a piece's places in the parameters count.
    """
    at = 0
    for piece in pieces:
        rows, width = piece.rows[1] - piece.rows[0], row_size(piece.move)
        slot = message[at : at + piece.num_bytes].view(dtype)
        slot = slot if piece.move.cols is None else slot.view(rows, width)
        at += piece.num_bytes
        for place in of_places(index.places(piece.move._replace(rows=piece.rows))):
            part = slot[place.at_rows] if place.at_cols is None else slot[place.at_rows, place.at_cols]
            yield part, view_of(tensors, place)


def flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as plans see it: [rows] or [rows, columns]."""
    tensor = tensor.detach()
    return tensor if tensor.dim() <= 2 else tensor.view(-1, tensor.shape[-1])


def view_of(tensors: Tensors, place: Place) -> torch.Tensor:
    """[rows] or [rows, columns] of a parameter."""
    rows = flat_rows(tensors[place.param])[place.rows]
    return rows if place.cols is None else rows[:, place.cols]


def common_slice(one: slice, other: slice) -> slice | None:
    """What two slices share; None if that is nothing."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else None


def part_of(view: torch.Tensor, place: Place, rows: slice, cols: slice | None) -> torch.Tensor:
    """The rows and columns of a rectangle, from the view of a place that holds them."""
    part = view[rows.start - place.at_rows.start : rows.stop - place.at_rows.start]
    if cols is None or place.at_cols is None:
        return part
    return part[:, cols.start - place.at_cols.start : cols.stop - place.at_cols.start]


def each_once(places: list[Place]) -> list[Place]:
    """Places without those that hold the same part again (a tied copy)."""
    parts: dict[tuple[object, ...], Place] = {}
    for place in places:
        cols = place.at_cols
        key = (place.at_rows.start, place.at_rows.stop, cols and cols.start, cols and cols.stop)
        parts.setdefault(key, place)
    return list(parts.values())
