"""Where rows of Hugging Face tensors lie in units: the pieces in which Megatron's files hold a parameter.

A unit is one parameter of one layer (of one expert), whole or one rank's shard of it, as rows and columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam


@dataclass(frozen=True)
class Unit:
    """A parameter of one expert (None: of no expert), or of none, by its name in the table.

    expert: its number among those of the rank. shape: [rows] or [rows, cols].
    """

    name: str
    expert: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class UnitPlace:
    """A block of a Hugging Face tensor, and the row of a unit in which it begins."""

    unit: Hashable
    row: int
    block: Block


def units_of(param: LocalParam) -> list[Unit]:
    """The units of a parameter: one, or one for each expert of a stack [experts, rows, cols]."""
    if len(param.shape) < 3:
        return [Unit(param.name, None, param.shape)]
    return [Unit(param.name, number, param.shape[1:]) for number in range(param.shape[0])]


def blocks_of(param: LocalParam) -> Iterator[tuple[Unit, int, Block]]:
    """The blocks of a parameter, each with its unit and its first row there."""
    units, at = units_of(param), 0
    rows = units[0].shape[0]
    for block in param.blocks:
        yield units[at // rows], at % rows, block
        at += block.num_rows


class PlacedSource(ABC):
    """A source whose tensors are put together from units."""

    def __init__(self, places: Mapping[str, list[UnitPlace]], dtypes: Mapping[str, torch.dtype]) -> None:
        self._places, self._dtypes = places, dtypes
        self._last: tuple[Hashable, torch.Tensor] | None = None

    @abstractmethod
    def unit(self, unit: Hashable) -> torch.Tensor:
        """The numbers of a unit: [rows] or [rows, cols], and padding below."""

    @abstractmethod
    def file(self, unit: Hashable) -> str:
        """The file that a unit is in."""

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See WeightSource."""
        faults = [f"missing {name}" for name in expected if name not in self._places]
        if faults:
            raise CheckpointError(first_of(faults, 20, "; "))

    def dtype(self, name: str) -> torch.dtype:
        """See ModelSource."""
        return self._dtypes[name]

    def place(self, name: str) -> str:
        """See WeightSource."""
        return self.file(self._places[name][0].unit)

    def read(self, block: Block) -> torch.Tensor:
        """See WeightSource."""
        cols = () if block.cols is None else (block.cols[1] - block.cols[0],)
        result = torch.empty((block.num_rows, *cols), dtype=self._dtypes[block.hf_name])
        filled = 0
        for place in self._places[block.hf_name]:
            rows = _overlap(block.rows, place.block.rows)
            columns = (
                (0, 1) if block.cols is None or place.block.cols is None else _overlap(block.cols, place.block.cols)
            )
            if rows is None or columns is None:
                continue
            start = place.row - place.block.rows[0]
            part = self._cached(place.unit)[start + rows[0] : start + rows[1]]
            target = result[rows[0] - block.rows[0] : rows[1] - block.rows[0]]
            if block.cols is not None and place.block.cols is not None:
                part = part[:, columns[0] - place.block.cols[0] : columns[1] - place.block.cols[0]]
                target = target[:, columns[0] - block.cols[0] : columns[1] - block.cols[0]]
            target.copy_(part)
            filled += target.numel()
        assert filled == result.numel(), f"{block}: {filled} numbers of {result.numel()} have a place"
        return result

    def _cached(self, unit: Hashable) -> torch.Tensor:
        """Tensors that are fused follow each other, so that the last unit is the next one too."""
        if self._last is None or self._last[0] != unit:
            self._last = None
            self._last = (unit, self.unit(unit))
        return self._last[1]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else None


def places_of(params: Iterable[LocalParam], key: Callable[[LocalParam, Unit], Hashable]) -> dict[str, list[UnitPlace]]:
    """Hugging Face tensor -> where its rows are. key: what a unit is called by its source."""
    places: dict[str, list[UnitPlace]] = {}
    for param in params:
        for unit, row, block in blocks_of(param):
            of_tensor = places.setdefault(block.hf_name, [])
            # What several ranks hold alike is read from the first.
            if all(place.block != block for place in of_tensor):
                of_tensor.append(UnitPlace(key(param, unit), row, block))
    return places
