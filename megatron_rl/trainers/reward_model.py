"""A reward model, top to bottom: rows of judged answers, a score read at each answer's last token, one update a step.

    samples -> assemble -> update

The losses are in algos/preference/scores.py. The model is the actor with a head of one number in place of next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algos.preference.base import Answers
from megatron_rl.data.preferences import PreferenceRow
from megatron_rl.flow import Flow, node
from megatron_rl.learning import passes
from megatron_rl.learning.passes import Models
from megatron_rl.learning.preferences import (
    LoadedRows,
    column_sums,
    forward_sums,
    load_rows,
    own_answers,
    put_columns,
)
from megatron_rl.trainers.dpo import Judged
from megatron_rl.trainers.parts import Parts
from megatron_rl.workers.objectives import ScoreObjective


def reward_model(parts: Parts) -> Flow:
    """The flow of one step."""
    models = parts.models
    nodes = [node(assemble, models, gives="loaded", group="policy"), node(update, models, group="policy")]
    return Flow(nodes, sources={"samples": list[PreferenceRow]})


def assemble(models: Models, samples: list[PreferenceRow]) -> LoadedRows:
    """Give each rank its rows, whole, and plan micro-batches."""
    return load_rows(models, samples, "ends")


def update(models: Models, loaded: LoadedRows) -> Judged:
    """One optimizer step over all rows, and the scores before it."""
    loss = models.cfg.judged_loss
    columns = put_columns(models, loaded, loss, None)
    objective = ScoreObjective(loss, loaded.per_row)
    updates = passes.run_updates(models, loaded.batch, loaded.plan, 1, "actor", objective, columns, "values")
    scores = column_sums(models, loaded, "values")
    return Judged(updates, own_answers(loss, scores, None, loaded.lens, loaded.targets))


def score_rows(parts: Parts, rows: Sequence[PreferenceRow], at_once: int) -> Answers:
    """Scores of rows by the model as it is, `at_once` rows in a pass."""
    models, scores, lens = parts.models, list[Tensor](), list[Tensor]()
    for at in range(0, len(rows), at_once):
        loaded = assemble(models, list(rows[at : at + at_once]))
        scores.append(forward_sums(models, loaded, "actor", "values", "values"))
        lens.append(loaded.lens)
    targets = torch.tensor([row.target for row in rows], dtype=torch.float64)
    return own_answers(models.cfg.judged_loss, torch.cat(scores), None, torch.cat(lens), targets)
