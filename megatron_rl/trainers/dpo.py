"""DPO (Rafailov et al. 2023) and its relatives, top to bottom: rows of judged answers, one update a step.

    samples -> assemble -> (ref_sums) -> (kl) -> update

The losses are in algos/preference. What a step needs of a row is a sum over each answer; the frozen model's is computed
in the row's first step and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algos.preference.base import Answers
from megatron_rl.data.preferences import PreferenceRow
from megatron_rl.flow import Flow, absent, node
from megatron_rl.learning import passes
from megatron_rl.learning.passes import Models
from megatron_rl.learning.preferences import (
    LoadedRows,
    column_sums,
    forward_sums,
    load_rows,
    own_answers,
    put_columns,
    put_nll_columns,
    text_sums,
)
from megatron_rl.trainers.parts import Parts
from megatron_rl.workers.objectives import PreferenceObjective
from megatron_rl.workers.records import UpdateResult


def dpo(parts: Parts) -> Flow:
    """The flow of one step."""
    loss, models = parts.cfg.judged_loss, parts.models
    nodes = [
        node(assemble, models, gives="loaded", group="policy"),
        node(ref_sums, parts, group="policy") if loss.needs_reference else absent("ref_sums"),
        node(estimate_kl, models, gives="kl", group="policy") if loss.mismatched else absent("kl"),
        node(update, models, group="policy"),
    ]
    return Flow(nodes, sources={"samples": list[PreferenceRow]})


def assemble(models: Models, samples: list[PreferenceRow]) -> LoadedRows:
    """Give each rank its rows, whole, and plan micro-batches."""
    return load_rows(models, samples, "texts" if models.cfg.judged_loss.adds_nll else "answers")


def ref_sums(parts: Parts, loaded: LoadedRows, samples: list[PreferenceRow]) -> Tensor:
    """[S] sums under the reference model."""
    return parts.references.sums(loaded, samples, "train")


def estimate_kl(models: Models, loaded: LoadedRows, ref_sums: Tensor) -> float:
    """KTO's z0, of the policy before its update: one number for all ranks."""
    values = forward_sums(models, loaded, "actor", "logprobs", "train_logprobs", ~loaded.own)
    return own_answers(models.cfg.judged_loss, values, ref_sums, loaded.lens, loaded.targets).kl


@dataclass(frozen=True)
class Judged:
    """What a step has done."""

    updates: list[UpdateResult]
    answers: Answers
    """Of the rows, under the policy before its update."""


def update(
    models: Models,
    loaded: LoadedRows,
    samples: list[PreferenceRow],
    ref_sums: Tensor | None = None,
    kl: float | None = None,
) -> Judged:
    """One optimizer step over all rows; mismatched answers have no part in it."""
    loss, plan, per_row = models.cfg.judged_loss, loaded.plan, loaded.per_row
    columns = put_columns(models, loaded, loss, ref_sums)
    if loss.adds_nll:
        columns |= put_nll_columns(models, loaded, samples)
    if loss.mismatched:
        plan, per_row = plan.keep(loaded.own), 1
    objective = PreferenceObjective(loss, per_row, kl or 0.0)
    updates = passes.run_updates(models, loaded.batch, plan, 1, "actor", objective, columns, "train_logprobs")
    values = column_sums(models, loaded, "train_logprobs")
    return Judged(updates, own_answers(loss, values, ref_sums, loaded.lens, loaded.targets))


def score_rows(parts: Parts, rows: Sequence[PreferenceRow], at_once: int) -> tuple[Answers, float]:
    """Rows under the policy as it is, `at_once` in a pass; and the mean negative log-likelihood of a token of the
    chosen texts, if the loss adds it, else 0.
    """
    loss, models = parts.cfg.judged_loss, parts.models
    values, refs, lens, nll, tokens = list[Tensor](), list[Tensor](), list[Tensor](), 0.0, 0
    for at in range(0, len(rows), at_once):
        some = list(rows[at : at + at_once])
        loaded = assemble(models, some)
        if loss.adds_nll:
            of_answers, of_texts = text_sums(models, loaded, some)
            nll -= float(of_texts[loaded.own].sum())
            tokens += int(loaded.batch.response_lens[loaded.own].sum())
        else:
            of_answers = forward_sums(models, loaded, "actor", "logprobs", "train_logprobs")
        values.append(of_answers)
        lens.append(loaded.lens)
        if loss.needs_reference:
            refs.append(parts.references.sums(loaded, some, "val"))
    targets = torch.tensor([row.target for row in rows], dtype=torch.float64)
    ref = torch.cat(refs) if refs else None
    return own_answers(loss, torch.cat(values), ref, torch.cat(lens), targets), nll / max(tokens, 1)
