"""The batch of a step on one rank as the controller calls it: it names sequences and columns, and gets facts back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_rl.algos.gae import Sums
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import MicroBatches
from megatron_rl.errors import FlowError
from megatron_rl.types import Column, SequenceRefs, TrainBatch
from megatron_rl.workers import token_work
from megatron_rl.workers.rank_batch import MaskedSequences, RankBatch
from megatron_rl.workers.token_work import CreditReport, MiniBatches, SequenceFacts


class BatchWorker:
    """Methods with a result are called on all ranks at once (cluster/worker_group.py).

    Every rank of a data-parallel replica loads the same sequences. Columns are on the last pipeline stage, where
    passes end; ranks of other stages have tokens alone and no part in work on columns.
    """

    def __init__(self, cfg: RunConfig, add_up: Sums, has_columns: bool) -> None:
        """add_up: over the data-parallel ranks. has_columns: this rank is of the last pipeline stage."""
        self._cfg, self._add_up, self._has_columns = cfg, add_up, has_columns
        self._loaded: RankBatch | None = None

    @property
    def _batch(self) -> RankBatch:
        if self._loaded is None:
            raise FlowError("no batch is on the ranks yet -- load one first")
        return self._loaded

    def load(self, source: SequenceRefs | MaskedSequences) -> None:
        """Fetch the sequences of a step; those of the step before are let go."""
        self._loaded = RankBatch.load(source)

    def micros(
        self, micros: MicroBatches, columns: Mapping[str, Column] | None = None, *, replay: bool = False
    ) -> list[TrainBatch]:
        """Micro-batches by sequence numbers. columns: {what the loss calls it: the column}. replay: routers choose the
        experts that the batch holds.
        """
        return self._batch.micros(micros, columns if self._has_columns else None, replay=replay)

    def write_routed(self, micros: MicroBatches, pieces: Sequence[torch.Tensor]) -> None:
        """The experts that a pass over `micros` chose on this rank, [tokens of each, layers, k]."""
        self._batch.write_routed(micros, pieces)

    def write(self, column: Column, micros: MicroBatches, pieces: Sequence[torch.Tensor]) -> None:
        """What a pass over `micros` gave, [tokens of each]; empty on a rank without columns."""
        self._batch.write(column, micros, pieces)

    def put(self, values: torch.Tensor, column: Column) -> None:
        """A whole column from outside, [T]."""
        self._batch.put(column, values)

    def fetch(self, column: Column) -> torch.Tensor:
        """[T] float32: a whole column, for a person."""
        return self._batch.column(column) if self._has_columns else torch.zeros(0)

    def sums(self, columns: Sequence[Column]) -> dict[Column, torch.Tensor]:
        """{column: [S] float64 its sum over each sequence's trained tokens}"""
        if not self._has_columns:
            return {}
        return {column: self._batch.sums(self._batch.column(column)) for column in columns}

    def not_finite(self, sequences: Sequence[int], columns: Mapping[str, Column]) -> dict[str, tuple[int, ...]]:
        """See RankBatch.not_finite."""
        return self._batch.not_finite(columns, sequences) if self._has_columns else {}

    def kl_sums(self, penalty: str) -> torch.Tensor:
        """See token_work.kl_sums."""
        if not self._has_columns:
            return torch.zeros(0)
        return token_work.kl_sums(self._batch, penalty)

    def credit(self, facts: SequenceFacts, kl_coef: float) -> CreditReport:
        """See token_work.credit."""
        if not self._has_columns:
            return CreditReport(facts.kept)
        return token_work.credit(self._batch, facts, self._cfg, kl_coef, self._add_up)

    def weigh(self, minis: MiniBatches) -> None:
        """Weights of all trained tokens in the actor's loss."""
        if self._has_columns:
            mode = self._cfg.actor.loss_agg_mode
            token_work.write_loss_weights(self._batch, "loss_weights", mode, minis, self._cfg, self._add_up)

    def compare(self, trainer: Column) -> dict[str, float]:
        """See token_work.compare."""
        return token_work.compare(self._batch, trainer, self._add_up) if self._has_columns else {}
