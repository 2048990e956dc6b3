"""How a parameter is made of Hugging Face tensors, and how tensor parallelism splits it: in Megatron and in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.models.shape import ModelShape

Size = Callable[[ModelShape], int]
"""A model's sizes -> one dim of a tensor"""


def hidden(shape: ModelShape) -> int:
    """Width of the residual stream."""
    return shape.hidden_size


def head_dim(shape: ModelShape) -> int:
    """Numbers of one head."""
    return shape.head_dim


def heads(shape: ModelShape) -> int:
    """Query heads."""
    return shape.num_heads


def query_size(shape: ModelShape) -> int:
    """Numbers of all query heads."""
    return shape.num_heads * shape.head_dim


def kv_size(shape: ModelShape) -> int:
    """Numbers of all key heads, and of all value heads."""
    return shape.num_kv_heads * shape.head_dim


def ffn(shape: ModelShape) -> int:
    """Inner size of the MLP, or of one expert."""
    return shape.ffn_size


def dense_ffn(shape: ModelShape) -> int:
    """Inner size of the MLP in first layers without experts."""
    return shape.dense_ffn_size


def shared_ffn(shape: ModelShape) -> int:
    """Inner size of the experts that all tokens pass, together."""
    return shape.shared_ffn_size


def gate_up(shape: ModelShape) -> int:
    """The gate and the up projection's rows of an MLP or an expert, together."""
    return 2 * shape.ffn_size


def one(shape: ModelShape) -> int:
    """The single row of a vector that is kept as a matrix."""
    return 1


def experts(shape: ModelShape) -> int:
    """Experts of a layer."""
    return shape.num_experts


def vocab(shape: ModelShape) -> int:
    """Tokens."""
    return shape.vocab_size


@dataclass(frozen=True)
class Block:
    """Rows (and columns, for matrices) of one HF tensor."""

    hf_name: str
    rows: tuple[int, int]
    cols: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


class Layout(Protocol):
    """How the HF tensors of a rule (names) lie on rank `rank` of the `parts` that share the parameter."""

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """The whole shape of each HF tensor."""
        ...

    def trainer(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """The blocks of Megatron's parameter from top to bottom."""
        ...

    def engine(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """The blocks of vLLM's parameter from top to bottom."""
        ...


def share(size: int, parts: int, rank: int) -> tuple[int, int]:
    """The equal share of `rank`."""
    assert size % parts == 0, (size, parts)
    return rank * (size // parts), (rank + 1) * (size // parts)


def _matrix(rows: Size, cols: Size | None, shape: ModelShape) -> tuple[int, ...]:
    return (rows(shape),) if cols is None else (rows(shape), cols(shape))


def _all_cols(cols: Size | None, shape: ModelShape) -> tuple[int, int] | None:
    return None if cols is None else (0, cols(shape))


@dataclass(frozen=True)
class Whole:
    """One tensor, the same on every rank."""

    rows: Size
    cols: Size | None = None

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """See Layout."""
        return [_matrix(self.rows, self.cols, shape)]

    def trainer(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout."""
        return [Block(names[0], (0, self.rows(shape)), _all_cols(self.cols, shape))]

    engine = trainer


@dataclass(frozen=True)
class Rows:
    """Tensors end to end, each split along its rows: an output dim, such as the gate and the up projection's."""

    rows: Size
    cols: Size | None = None
    count: int = 1

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """See Layout."""
        return [_matrix(self.rows, self.cols, shape)] * self.count

    def trainer(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout."""
        rows, cols = share(self.rows(shape), parts, rank), _all_cols(self.cols, shape)
        return [Block(name, rows, cols) for name in names]

    engine = trainer


@dataclass(frozen=True)
class Cols:
    """One matrix, split along its columns: an input dim."""

    rows: Size
    cols: Size

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """See Layout."""
        return [(self.rows(shape), self.cols(shape))]

    def trainer(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout."""
        return [Block(names[0], (0, self.rows(shape)), share(self.cols(shape), parts, rank))]

    engine = trainer


@dataclass(frozen=True)
class AddedOnce:
    """A bias [1, cols] of what ranks add up: whole on each of the trainer's, which add a part of it; vLLM adds it on
    the first rank and has zeros on the others.
    """

    cols: Size

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """See Layout."""
        return [(1, self.cols(shape))]

    def trainer(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout."""
        return [Block(names[0], (0, 1), (0, self.cols(shape)))]

    def engine(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout."""
        return [Block(names[0], (0, int(rank == 0)), (0, self.cols(shape)))]


@dataclass(frozen=True)
class Qkv:
    """Projections of queries, keys and values of grouped-query attention, fused. cols: None for their biases."""

    cols: Size | None = hidden

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """See Layout."""
        return [_matrix(rows, self.cols, shape) for rows in (query_size, kv_size, kv_size)]

    def trainer(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout. Megatron keeps the queries, the key and the value of a KV group together."""
        head, per_group = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
        cols = _all_cols(self.cols, shape)
        blocks: list[Block] = []
        for group in range(*share(shape.num_kv_heads, parts, rank)):
            blocks.append(Block(names[0], (group * per_group, (group + 1) * per_group), cols))
            blocks.extend(Block(name, (group * head, (group + 1) * head), cols) for name in names[1:])
        return blocks

    def engine(self, names: Sequence[str], shape: ModelShape, parts: int, rank: int) -> list[Block]:
        """See Layout. vLLM copies KV heads to the ranks beyond them: heads are dealt to groups of ranks."""
        groups = min(parts, shape.num_kv_heads)
        heads = share(kv_size(shape), groups, rank // (parts // groups))
        cols = _all_cols(self.cols, shape)
        queries = Block(names[0], share(query_size(shape), parts, rank), cols)
        return [queries, *(Block(name, heads, cols) for name in names[1:])]
