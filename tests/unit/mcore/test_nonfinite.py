"""What is said of steps, columns and weights that are not finite, and when a run ends for them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.errors import CheckpointError, NonFiniteError
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.runs.metrics import update_metrics
from megatron_rl.types import BadMicroBatch, Metric, StepReport, TrainBatch
from megatron_rl.weights.safetensors import refuse_nonfinite

NAN, INF = float("nan"), float("inf")
RANKS = (((0, 3), (1,)), ((4,), (2, 5)))
"""[dp][micro-batch] sequences"""
ROWS = [f"a.jsonl row {number}" for number in (11, 12, 13, 14, 15, 16)]


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
        _guard().look(_report(*bad), "critic", 2, RANKS, ROWS)
    text = str(caught.value)
    for part in ["step 7, mini-batch 2", "critic's loss nan", "trainer.on_nonfinite=skip", *parts]:
        assert part in text, (part, text)
    assert not [part for part in absent if re.search(rf"{part}\b", text)]


def test_a_step_that_was_made_is_not_looked_at_further() -> None:
    guard = _guard()
    guard.look(StepReport(1.0, 2.0, 1e-3), "actor", 1, RANKS, ROWS)
    assert guard.skips == 0 and guard.metrics({"policy": []}) == {}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_skips_end_at_their_limit_over_all_steps(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each is warned of by its rows; the one after the last ends the run and says which key to raise."""
    guard = _guard(on_nonfinite="skip", max_nonfinite_skips=limit)
    report = _report(BadMicroBatch(0, 0, 1, (0,), "loss"))
    with caplog.at_level(logging.WARNING):
        for number in range(limit):
            guard.step = number
            guard.look(report, "actor", 1, RANKS, ROWS)
    assert [f"passed over ({n} of at most {limit})" in r.message for n, r in enumerate(caplog.records, 1)] == [
        True
    ] * limit
    assert all("row 12" in record.message for record in caplog.records)
    with pytest.raises(NonFiniteError, match=rf"{limit} mini-batches .*trainer.max_nonfinite_skips"):
        guard.look(report, "actor", 1, RANKS, ROWS)


def test_skips_are_counted_by_model_and_in_all() -> None:
    guard = _guard(on_nonfinite="skip")
    guard.look(_report(), "actor", 1, RANKS, ROWS)
    found = guard.metrics({"policy": [_report(), StepReport(1.0, 1.0, 0.1)], "critic": [StepReport(1.0, 1.0, 0.1)]})
    assert found == {"policy/nonfinite_skips": 1.0, "critic/nonfinite_skips": 0.0, "trainer/nonfinite_skips": 1.0}


def test_steps_that_were_not_made_are_in_no_mean() -> None:
    made = StepReport(2.0, 3.0, 0.5, {"entropy": Metric(4.0, 2.0)})
    lost = StepReport(NAN, INF, 0.5, {"entropy": Metric(NAN, 2.0)}, updated=False)
    assert update_metrics([lost, made]) == update_metrics([made])
    assert update_metrics([lost]) == {"policy/updates": 0.0}


def _batch(**columns: float) -> TrainBatch:
    """Three sequences of two tokens; each named column has the given value at the second token of the second one."""
    filled = {}
    for name, value in columns.items():
        filled[name] = torch.zeros(6)
        filled[name][3] = value
    mask = torch.tensor([False, True] * 3)
    return TrainBatch(torch.zeros(6, dtype=torch.int64), (2, 2, 2), mask, filled)


@pytest.mark.parametrize("name", ["advantages", "returns", "old_logprobs", "ref_logprobs", "loss_weights"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_columns_of_the_loss_are_looked_at_before_the_first_mini_batch(name: str, value: float) -> None:
    with pytest.raises(NonFiniteError) as caught:
        _guard().look_at_columns(_batch(**{name: value}), "actor", [0, 1, 2], ROWS)
    text = str(caught.value)
    for part in ("step 7", name.replace("_", " "), "1 sequences", "a.jsonl row 12", "rewards"):
        assert part in text
    # Where the sequence takes no part in the update, or mini-batches are skipped, it ends nothing here.
    _guard().look_at_columns(_batch(**{name: value}), "actor", [0, 2], ROWS)
    _guard(on_nonfinite="skip").look_at_columns(_batch(**{name: value}), "actor", [0, 1, 2], ROWS)


def test_untrained_tokens_may_hold_anything() -> None:
    batch = _batch(advantages=0.0)
    batch.columns["advantages"][2] = NAN
    _guard().look_at_columns(batch, "actor", [0, 1, 2], ROWS)


def test_tensors_that_are_not_finite_are_named_file_by_file() -> None:
    refuse_nonfinite({})
    with pytest.raises(CheckpointError) as caught:
        refuse_nonfinite({"b": "m/2.safetensors", "a": "m/1.safetensors", "c": "m/2.safetensors"})
    assert "3 tensors" in str(caught.value)
    assert "m/2.safetensors: b, c | m/1.safetensors: a" in str(caught.value)
