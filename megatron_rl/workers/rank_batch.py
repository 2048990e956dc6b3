"""The batch of a step on one data-parallel rank: loaded once, columns written where they are computed and never sent.

The controller names sequences by their numbers in the step, and columns by their names. Letters: S sequences of this
rank, T their tokens end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron_rl.data.batching import MicroBatches
from megatron_rl.errors import FlowError
from megatron_rl.types import Column, Float32, Int32, SequenceRefs, TrainBatch

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class MaskedSequences:
    """Sequences with masks of their own (SFT): what a data-parallel rank is given. The first token of each is never
    trained on: nothing predicts it.
    """

    numbers: tuple[int, ...]
    """[S] what each is called in the step"""
    tokens: tuple[Int32, ...]
    """[S] ids of each"""
    masks: tuple[npt.NDArray[np.bool_], ...]
    """[S] which of them are trained on"""


class RankBatch:
    """Tokens, mask and columns of this rank's sequences.

    Tensors lie on the CPU, as mcore.packing wants them; micro-batches go to the device one by one.
    """

    def __init__(self, numbers: Sequence[int], batch: TrainBatch) -> None:
        """numbers: [S] what each sequence of `batch` is called in the step. Its columns are the first ones here."""
        assert len(numbers) == batch.num_sequences, (len(numbers), batch.num_sequences)
        self.numbers = tuple(numbers)
        self._batch = batch
        self._place = {number: i for i, number in enumerate(self.numbers)}

    @staticmethod
    def load(source: SequenceRefs | MaskedSequences) -> RankBatch:
        """From references to what engines sampled, or from sequences as they are."""
        if isinstance(source, MaskedSequences):
            return RankBatch(source.numbers, masked_sequences(source.tokens, source.masks))
        responses, logprobs = source.fetch()
        batch = end_to_end(source.prompts, source.prompt_of.tolist(), responses, logprobs)
        return RankBatch(source.numbers, replace(batch, routed=routed_of(source, batch.starts)))

    @property
    def num_sequences(self) -> int:
        return self._batch.num_sequences

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """[S] tokens of each sequence."""
        return self._batch.seq_lens

    @property
    def tokens(self) -> torch.Tensor:
        """[T] int64"""
        return self._batch.tokens

    @property
    def loss_mask(self) -> torch.Tensor:
        """[T] bool"""
        return self._batch.loss_mask

    @property
    def segments(self) -> torch.Tensor:
        """[T] int64: the place of each token's sequence in `numbers`."""
        return self._batch.segments

    def __contains__(self, column: str) -> bool:
        return column in self._batch.columns

    def column(self, name: Column) -> torch.Tensor:
        """[T] float32. Raises FlowError if nothing has written it."""
        if name not in self._batch.columns:
            known = ", ".join(self._batch.columns) or "none"
            raise FlowError(
                f"the batch on the ranks has no column {name!r}; it has: {known} -- run the pass that writes it, or "
                "put it there (put_column)"
            )
        return self._batch.columns[name]

    def put(self, name: Column, values: torch.Tensor) -> None:
        """Write a whole column; values: [T]. Entries off the loss mask count for nothing and become 0."""
        total = self._batch.num_tokens
        assert values.shape == (total,), (name, values.shape, total)
        self._batch.columns[name] = torch.where(self.loss_mask, values.float(), 0.0)

    def write(self, name: Column, micros: MicroBatches, pieces: Sequence[torch.Tensor]) -> None:
        """Write what a pass gave of some sequences; others keep their entries, 0 if they have none yet.

        micros: sequence numbers of each micro-batch. pieces: of each, [tokens of the micro-batch] values.
        """
        if not pieces:
            return
        column = self._batch.columns.setdefault(name, torch.zeros(self._batch.num_tokens))
        index = torch.cat([self._tokens_of(micro) for micro in micros])
        column[index] = torch.cat([piece.float() for piece in pieces])

    def write_routed(self, micros: MicroBatches, pieces: Sequence[torch.Tensor]) -> None:
        """Write the experts that a pass chose, [tokens of the micro-batch, layers, k] of each, numbered from 1."""
        # A micro-batch of padding has no expert to say the dtype.
        dtype = torch.promote_types(torch.uint8, max((p.dtype for p in pieces), key=lambda dtype: dtype.itemsize))
        if self._batch.routed is None:
            sizes = max((piece.shape[1:] for piece in pieces), key=lambda size: size[-1])
            self._batch = replace(self._batch, routed=torch.zeros(self._batch.num_tokens, *sizes, dtype=dtype))
        assert self._batch.routed is not None
        if self._batch.routed.dtype.itemsize < dtype.itemsize:
            self._batch = replace(self._batch, routed=self._batch.routed.to(dtype))
        assert self._batch.routed is not None
        for micro, piece in zip(micros, pieces, strict=True):
            if len(piece):
                self._batch.routed[self._tokens_of(micro)] = piece.to(dtype)

    def micro(
        self, sequences: Sequence[int], columns: Mapping[str, Column] | None = None, *, replay: bool = False
    ) -> TrainBatch:
        """The given sequences, in the given order. columns: {what the loss calls it: the column here}. replay: with the
        experts that their routers are to choose; FlowError if nothing has written them.
        """
        if replay and self._batch.routed is None:
            raise FlowError(
                "the batch on the ranks has no choices of experts to replay -- run the pass that records them (old "
                "log-probabilities), or an engine that returns them"
            )
        index = self._tokens_of(sequences)
        chosen = {name: self.column(source) for name, source in (columns or {}).items()}
        return TrainBatch(
            tokens=self.tokens[index],
            seq_lens=tuple(self.seq_lens[self._place[number]] for number in sequences),
            loss_mask=self.loss_mask[index],
            columns={name: column[index] for name, column in chosen.items()},
            routed=self._batch.routed[index] if replay and self._batch.routed is not None else None,
        )

    def micros(
        self, micros: MicroBatches, columns: Mapping[str, Column] | None = None, *, replay: bool = False
    ) -> list[TrainBatch]:
        """`micro` of each."""
        return [self.micro(micro, columns, replay=replay) for micro in micros]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[S] float64: the sum of [T] values over each sequence's trained tokens."""
        totals = torch.zeros(self.num_sequences, dtype=torch.float64)
        return totals.index_add_(0, self.segments, values.double() * self.loss_mask)

    def not_finite(self, columns: Mapping[str, Column], sequences: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """{what the loss calls a column: numbers of those of `sequences` where it is not finite at a trained token}."""
        wanted = torch.zeros(self.num_sequences, dtype=torch.bool)
        wanted[[self._place[number] for number in sequences]] = True
        seen = self.loss_mask & wanted[self.segments]
        bad = {name: self.segments[~torch.isfinite(self.column(source)) & seen] for name, source in columns.items()}
        return {
            name: tuple(self.numbers[i] for i in places.unique().tolist())
            for name, places in bad.items()
            if len(places)
        }

    def _tokens_of(self, sequences: Sequence[int]) -> torch.Tensor:
        """Where the tokens of the given sequences are, end to end."""
        starts = self._batch.starts
        places = [self._place[number] for number in sequences]
        pieces = [torch.arange(starts[i], starts[i + 1]) for i in places]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def routed_of(source: SequenceRefs, starts: Sequence[int]) -> torch.Tensor | None:
    """[T, layers, k] the experts that engines chose, 0 where they chose none: they do not compute the last token of a
    sequence. None if they returned none. starts: first token of each sequence, and T.
    """
    parts = [part.fetch() for part in source.parts]
    tables = [part.routed for part in parts if part.routed is not None]
    if not tables:
        return None
    widest = max(tables, key=lambda table: table.itemsize)
    whole = torch.zeros(starts[-1], *widest.shape[1:], dtype=torch.from_numpy(widest[:0]).dtype)
    for sequence, (part, row) in enumerate(zip(source.part_of.tolist(), source.row_of.tolist(), strict=True)):
        rows = parts[part].routed_rows(row)
        if rows is not None:
            assert len(rows) <= starts[sequence + 1] - starts[sequence], (len(rows), sequence)
            whole[starts[sequence] : starts[sequence] + len(rows)] = torch.from_numpy(rows.copy())
    return whole


def end_to_end(
    prompts: Sequence[Int32], prompt_of: Sequence[int], responses: Sequence[Int32], logprobs: Sequence[Float32]
) -> TrainBatch:
    """Prompts and responses as sequences; the mask is on the responses, column rollout_logprobs holds `logprobs`.

    prompts: ids of each prompt. prompt_of: [S] the prompt of each response. responses: [S] sampled ids, as they came.
    logprobs: [S] the engine's log-probability of each.
    """
    pieces: list[Int32] = []
    for prompt, response in zip(prompt_of, responses, strict=True):
        pieces += (prompts[prompt], response)
    lens = np.array([len(piece) for piece in pieces], dtype=np.int64)
    tokens = torch.from_numpy(_joined(pieces, np.int32).astype(np.int64))
    # Pieces are a prompt and a response in turn.
    mask = torch.from_numpy(np.repeat(np.arange(len(pieces)) % 2 == 1, lens))
    of_engine = torch.zeros(len(tokens))
    of_engine[mask] = torch.from_numpy(_joined(logprobs, np.float32))
    seq_lens = tuple((lens[0::2] + lens[1::2]).tolist())
    return TrainBatch(tokens, seq_lens, mask, {"rollout_logprobs": of_engine})


def masked_sequences(tokens: Sequence[Int32], masks: Sequence[npt.NDArray[np.bool_]]) -> TrainBatch:
    """See MaskedSequences."""
    lens = tuple(len(ids) for ids in tokens)
    mask = torch.from_numpy(_joined(masks, np.bool_))
    mask[[0, *accumulate(lens)][: len(lens)]] = False
    return TrainBatch(torch.from_numpy(_joined(tokens, np.int32).astype(np.int64)), lens, mask)


def _joined(arrays: Sequence[npt.NDArray[Scalar]], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """One array of its own, also from none."""
    return np.concatenate([np.zeros(0, dtype), *arrays])
