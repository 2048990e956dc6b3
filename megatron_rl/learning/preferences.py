"""Rows that were judged, on the ranks: their sequences, the sums of their answers, and what a frozen model gives them.

R rows of a step become S sequences, those of a row next to each other, in one micro-batch and on one rank. Losses read
sums over answers, so the controller keeps a number an answer and no tokens.
"""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algos.preference.base import Answers, JudgedLoss
from megatron_rl.algos.preference.tokens import kl_estimate
from megatron_rl.data.batching import BatchPlan
from megatron_rl.data.preferences import AnswerTokens, PreferenceRow
from megatron_rl.learning.batch import Batch, OnRanks, plan_roles
from megatron_rl.learning.passes import Models
from megatron_rl.types import Column
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.rank_batch import MaskedSequences
from megatron_rl.workers.records import ModelColumn, Role

Form = Literal["answers", "texts", "ends"]
"""What of a sequence is trained on: its answer; or, of a pair, the rejected answer and the whole chosen text; or one
token more, which stands behind the last one, whose state a score is read off."""


@dataclass(frozen=True)
class LoadedRows:
    """Rows whose sequences the ranks hold. Letters as above."""

    batch: Batch
    plan: BatchPlan
    lens: Tensor
    """[S] float64: tokens of each answer"""
    targets: Tensor
    """[R] float64, see Answers"""
    sources: tuple[str, ...]
    """[R] data source of each row"""

    @property
    def per_row(self) -> int:
        """Sequences of a row."""
        return len(self.lens) // len(self.targets)

    @property
    def own(self) -> Tensor:
        """[S] bool: the first sequence of each row."""
        return torch.arange(len(self.lens)) % self.per_row == 0

    @property
    def segments(self) -> Tensor:
        """[T] int64: the sequence of each token, sequence after sequence."""
        return torch.arange(len(self.lens)).repeat_interleave(torch.tensor(self.batch.seq_lens))


def load_rows(models: Models, rows: Sequence[PreferenceRow], form: Form = "answers") -> LoadedRows:
    """Plan one mini-batch of all rows, and have each rank hold its own."""
    per_row = len(rows[0].answers)
    sequences = [_formed(answer, form) for row in rows for answer in row.answers]
    seq_lens = tuple(len(answer.token_ids) for answer in sequences)
    masks = [_mask(answer, form == "texts" and s % per_row == 0) for s, answer in enumerate(sequences)]
    role = (models.cfg.actor_training, [0] * len(sequences))
    (plan,), numbers = plan_roles(models.cfg, seq_lens, [role], together=per_row)
    batch = Batch(
        seq_lens,
        response_lens=torch.tensor([int(mask[1:].sum()) for mask in masks]),
        numbers=numbers,
        group_ids=torch.arange(len(rows)).repeat_interleave(per_row),
        was_cut=torch.zeros(len(sequences), dtype=torch.bool),
        names=lambda: [f"{row.where} answer {number}" for row in rows for number in range(1, per_row + 1)],
    )
    arrays = [np.array(answer.token_ids, np.int32) for answer in sequences]
    sources = [
        MaskedSequences(of_rank, tuple(arrays[s] for s in of_rank), tuple(masks[s] for s in of_rank))
        for of_rank in numbers
    ]
    models.group.each_dp(BatchWorker.load, sources)
    counts = [answer.num_trained for row in rows for answer in row.answers]
    lens = torch.tensor(counts, dtype=torch.float64)
    targets = torch.tensor([row.target for row in rows], dtype=torch.float64)
    return LoadedRows(batch, plan, lens, targets, tuple(row.data_source for row in rows))


def _formed(answer: AnswerTokens, form: Form) -> AnswerTokens:
    if form != "ends":
        return answer
    ids = answer.token_ids
    # Which token it is does not matter: no state that is read has seen it.
    return AnswerTokens((*ids, ids[-1]), (False,) * len(ids) + (True,))


def _mask(answer: AnswerTokens, whole: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(len(answer.token_ids), np.bool_) if whole else np.array(answer.loss_mask, np.bool_)


def put_columns(models: Models, loaded: LoadedRows, loss: JudgedLoss, ref: Tensor | None) -> dict[str, Column]:
    """Give the ranks what the loss reads of each token beside the model's values. ref: [S] sums.

    Returns {what the loss calls a column: the column}.
    """
    batch, rows = loaded.batch, len(loaded.targets)
    values: dict[Column, Tensor] = {"loss_weights": torch.full((len(loaded.lens),), 1.0 / rows)}
    if ref is not None:
        # A loss adds them up again: the ranks are given no more than a number an answer.
        values["ref_logprobs"] = ref / batch.response_lens.clamp(min=1)
    if loss.rows != "pairs" or loss.reads_margins:
        values["targets"] = loaded.targets.repeat_interleave(loaded.per_row)
    for column, of_sequences in values.items():
        models.put(batch, column, of_sequences[loaded.segments])
    return {column: column for column in values}


def put_nll_columns(models: Models, loaded: LoadedRows, rows: Sequence[PreferenceRow]) -> dict[str, Column]:
    """Columns of a loss that adds the negative log-likelihood of the chosen texts; see AnswerLoss."""
    batch, num_rows = loaded.batch, len(loaded.targets)
    models.put(batch, "answers", _in_answers(rows).float())
    # Of a row's share of the loss: that is divided by the number of rows.
    weight = num_rows / max(int(batch.response_lens[loaded.own].sum()), 1)
    models.put(batch, "nll_weights", loaded.own[loaded.segments].float() * weight)
    return {"answers": "answers", "nll_weights": "nll_weights"}


def _in_answers(rows: Sequence[PreferenceRow]) -> Tensor:
    """[T] bool: tokens of answers."""
    return torch.tensor([flag for row in rows for answer in row.answers for flag in answer.loss_mask])


def text_sums(models: Models, loaded: LoadedRows, rows: Sequence[PreferenceRow]) -> tuple[Tensor, Tensor]:
    """Of rows loaded as "texts", under the actor: [S] float64 sums over answers, and [S] over all trained tokens."""
    models.forward(loaded.plan, "actor", {"logprobs": "train_logprobs"}, temperature=1.0)
    logprobs = models.fetch(loaded.batch, OnRanks("train_logprobs")).double()
    zeros = torch.zeros(len(loaded.lens), dtype=torch.float64)
    answers = zeros.index_add(0, loaded.segments, logprobs * _in_answers(rows))
    return answers, zeros.index_add(0, loaded.segments, logprobs)


def forward_sums(
    models: Models, loaded: LoadedRows, role: Role, read: ModelColumn, into: Column, kept: Tensor | None = None
) -> Tensor:
    """[S] float64: of each sequence the sum of what a role's model gives its trained tokens. kept: [S] bool, which
    sequences to read; others keep what the column has.
    """
    plan = loaded.plan if kept is None else loaded.plan.keep(kept)
    models.forward(plan, role, {read: into}, temperature=1.0)
    return column_sums(models, loaded, into)


def column_sums(models: Models, loaded: LoadedRows, column: Column) -> Tensor:
    """[S] float64: of each sequence the sum of a column over its trained tokens."""
    return loaded.batch.join([sums[column] for sums in models.on_each(BatchWorker.sums, (column,))])


class References:
    """Sums of answers under the reference model, computed once for each row of the data and kept."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._kept: dict[str, dict[int, list[float]]] = {}

    def sums(self, loaded: LoadedRows, rows: Sequence[PreferenceRow], data_set: str) -> Tensor:
        """[S] float64. data_set: "train" or "val", whose rows these are."""
        kept = self._kept.setdefault(data_set, {})
        unknown = [row.index not in kept for row in rows]
        if any(unknown):
            new = torch.tensor(unknown).repeat_interleave(loaded.per_row)
            found = forward_sums(self._models, loaded, "reference", "logprobs", "ref_logprobs", new)
            of_rows = found.view(-1, loaded.per_row).tolist()
            kept |= {row.index: of_row for row, of_row, new in zip(rows, of_rows, unknown, strict=True) if new}
        return torch.tensor([kept[row.index] for row in rows], dtype=torch.float64).flatten()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same numbers."""
        return {name: [[index, *sums] for index, sums in kept.items()] for name, kept in self._kept.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._kept = {name: {index: sums for index, *sums in kept} for name, kept in state.items()}


def own_answers(loss: JudgedLoss, values: Tensor, ref: Tensor | None, lens: Tensor, targets: Tensor) -> Answers:
    """What the loss is given of rows: their own answers, with KTO's z0 of their mismatched ones.

    values, ref, lens: [S] of all sequences; the mismatched ones are read if the loss has them. targets: [R]
    """
    answers = Answers(values, torch.zeros_like(values) if ref is None else ref, lens, targets)
    if not loss.mismatched:
        return answers
    others, own = answers.select(slice(1, None, 2)), answers.select(slice(0, None, 2))
    return replace(own, kl=kl_estimate(others.values, others.ref_logprobs))
