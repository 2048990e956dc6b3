"""What is said of steps, columns and weights that are not finite, and when a run ends for them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.data.batching import BatchPlan
from megatron_rl.errors import CheckpointError, NonFiniteError
from megatron_rl.learning.batch import Batch
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.learning.passes import Models, look_at_columns
from megatron_rl.runs.metrics import update_metrics
from megatron_rl.types import BadMicroBatch, Column, Metric, Prompt, Rollout, RolloutGroup, StepReport
from megatron_rl.weights.safetensors import refuse_nonfinite
from tests.helpers.batch_rank import loaded
from tests.helpers.config import load

NAN, INF = float("nan"), float("inf")
RANKS = (((0, 3), (1,)), ((4,), (2, 5)))
"""[dp][micro-batch] sequences"""
ROWS = [f"a.jsonl row {number}" for number in (11, 12, 13, 14, 15, 16)]


def names() -> list[str]:
    """What each sequence is called."""
    return ROWS


def _report(*bad: BadMicroBatch, loss: float = NAN) -> StepReport:
    return StepReport(loss, NAN, 1e-3, updated=False, bad=bad)


def _guard(step: int = 7, **settings: Any) -> NonFiniteGuard:
    guard = NonFiniteGuard(TrainerConfig(**settings))
    guard.step = step
    return guard


@pytest.mark.parametrize(
    ("bad", "parts", "absent"),
    [
        ((BadMicroBatch(0, 0, 0, (1,), "loss"),), ["micro-batch 1 of", "rank 0", "row 14"], ["row 11", "row 12"]),
        ((BadMicroBatch(3, 1, 1, (0, 1), "loss"),), ["micro-batch 2 of", "rank 3", "row 13", "row 16"], ["row 15"]),
        ((BadMicroBatch(2, 1, 0, None, "gradient"),), ["gradient of micro-batch 1", "rank 2", "row 15"], ["row 13"]),
        (
            (BadMicroBatch(1, 0, 1, (0,), "loss"), BadMicroBatch(0, 0, 1, (0,), "loss")),
            ["ranks 0, 1", "row 12"],
            ["row 11"],
        ),
        (
            (BadMicroBatch(0, 0, 0, (0,), "loss"), BadMicroBatch(2, 1, 0, (0,), "loss")),
            ["row 11", "row 15", "; "],
            ["row 14"],
        ),
        ((), ["their sum is not", *ROWS], []),
    ],
)
def test_a_refused_step_names_step_mini_batch_model_ranks_and_rows(
    bad: tuple[BadMicroBatch, ...], parts: list[str], absent: list[str]
) -> None:
    with pytest.raises(NonFiniteError) as caught:
        _guard().look(_report(*bad), "critic", 2, RANKS, names)
    text = str(caught.value)
    for part in ["step 7, mini-batch 2", "critic's loss nan", "trainer.on_nonfinite=skip", *parts]:
        assert part in text, (part, text)
    assert not [part for part in absent if re.search(rf"{part}\b", text)]


def test_a_step_that_was_made_is_not_looked_at_further() -> None:
    guard = _guard()
    guard.look(StepReport(1.0, 2.0, 1e-3), "actor", 1, RANKS, names)
    assert guard.skips == 0 and guard.metrics({"policy": []}) == {}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_skips_end_at_their_limit_over_all_steps(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each is warned of by its rows; the one after the last ends the run and says which key to raise."""
    guard = _guard(on_nonfinite="skip", max_nonfinite_skips=limit)
    report = _report(BadMicroBatch(0, 0, 1, (0,), "loss"))
    with caplog.at_level(logging.WARNING):
        for number in range(limit):
            guard.step = number
            guard.look(report, "actor", 1, RANKS, names)
    assert [f"passed over ({n} of at most {limit})" in r.message for n, r in enumerate(caplog.records, 1)] == [
        True
    ] * limit
    assert all("row 12" in record.message for record in caplog.records)
    with pytest.raises(NonFiniteError, match=rf"{limit} mini-batches .*trainer.max_nonfinite_skips"):
        guard.look(report, "actor", 1, RANKS, names)


def test_skips_are_counted_by_model_and_in_all() -> None:
    guard = _guard(on_nonfinite="skip")
    guard.look(_report(), "actor", 1, RANKS, names)
    found = guard.metrics({"policy": [_report(), StepReport(1.0, 1.0, 0.1)], "critic": [StepReport(1.0, 1.0, 0.1)]})
    assert found == {"policy/nonfinite_skips": 1.0, "critic/nonfinite_skips": 0.0, "trainer/nonfinite_skips": 1.0}


def test_steps_that_were_not_made_are_in_no_mean() -> None:
    made = StepReport(2.0, 3.0, 0.5, {"entropy": Metric(4.0, 2.0)})
    lost = StepReport(NAN, INF, 0.5, {"entropy": Metric(NAN, 2.0)}, updated=False)
    assert update_metrics([lost, made]) == update_metrics([made])
    assert update_metrics([lost]) == {"policy/updates": 0.0}


def _models(folder: Path, name: Column, value: float, *settings: str) -> tuple[Models, Batch]:
    """Three sequences of two tokens; the named column has the value at the second token of the second one."""
    groups = [
        RolloutGroup(Prompt(g, (5,), "", "", None, where=ROWS[g]), (Rollout((7,), (-1.0,), "stop", ""),), 0)
        for g in range(3)
    ]
    models, batch, _ = loaded(load(folder, *settings), groups)
    models.guard.step = 7
    models.put(batch, name, torch.tensor([0.0, 0.0, 0.0, value, 0.0, 0.0]))
    return models, batch


@pytest.mark.parametrize("name", ["advantages", "returns", "old_logprobs", "ref_logprobs", "loss_weights"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_columns_of_the_loss_are_looked_at_before_the_first_mini_batch(
    tmp_path: Path, name: Column, value: float
) -> None:
    models, batch = _models(tmp_path, name, value)
    with pytest.raises(NonFiniteError) as caught:
        look_at_columns(models, batch, BatchPlan(((((0, 1), (2,)),),)), "actor", {name: name})
    text = str(caught.value)
    for part in ("step 7", name.replace("_", " "), "1 sequences", "a.jsonl row 12 sample 1", "rewards"):
        assert part in text
    # If the sequence takes no part in the update, or mini-batches are skipped, it ends nothing here.
    look_at_columns(models, batch, BatchPlan(((((0,), (2,)),),)), "actor", {name: name})
    skips, batch = _models(tmp_path / "skips", name, value, "trainer.on_nonfinite=skip")
    look_at_columns(skips, batch, BatchPlan(((((0, 1), (2,)),),)), "actor", {name: name})


def test_tensors_that_are_not_finite_are_named_file_by_file() -> None:
    refuse_nonfinite({})
    with pytest.raises(CheckpointError) as caught:
        refuse_nonfinite({"b": "m/2.safetensors", "a": "m/1.safetensors", "c": "m/2.safetensors"})
    assert "3 tensors" in str(caught.value)
    assert "m/2.safetensors: b, c | m/1.safetensors: a" in str(caught.value)
