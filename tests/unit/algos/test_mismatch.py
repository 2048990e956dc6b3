"""Engine and trainer disagree: warned of, then stopped; and what the line of a step shows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.correction import mismatch_metrics
from megatron_rl.data.batching import BatchPlan
from megatron_rl.errors import RolloutError
from megatron_rl.flow import Node
from megatron_rl.flow.run import PartialRun
from megatron_rl.learning import passes
from megatron_rl.learning.mismatch import MismatchGuard
from megatron_rl.learning.passes import Models
from megatron_rl.observe.step_line import step_line
from megatron_rl.runs.trainer import StepUnderWay, Trainer
from tests.helpers.config import load, only_fault

PPO = ["algorithm.name=ppo", "critic.enable=true", "algorithm.adv_estimator=gae", "rollout.n=1"]
NAN, INF = float("nan"), float("inf")


def _guard(folder: Path, *settings: str) -> MismatchGuard:
    return MismatchGuard(load(folder, *settings))


def _metrics(mean: float, broken: float = 0.0) -> dict[str, float]:
    return {"mismatch/abs_mean": mean, "mismatch/abs_max": 5 * mean, "mismatch/nonfinite_tokens": broken}


def test_n8_a_mismatch_that_holds_is_warned_of_and_then_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """N8: the third step in a row ends it, a step below begins the count anew; the messages hold number and cure."""
    guard = _guard(tmp_path)
    with caplog.at_level(logging.WARNING):
        counts = [
            guard.look(n, _metrics(mean))["mismatch/steps_above"] for n, mean in enumerate((0.1, 0.3, 0.3, 0.2, 1))
        ]
    assert counts == [0, 1, 2, 0, 1]
    assert len(caplog.records) == 3 and "algorithm.max_mismatch is 0.2" in caplog.records[0].message
    assert "step 1" in caplog.records[0].message and "3 such steps in a row (this is 1)" in caplog.records[0].message
    guard.look(5, _metrics(1.0))
    with pytest.raises(RolloutError) as caught:
        guard.look(6, _metrics(0.75))
    for part in ("step 6", "0.75 nats", "largest is 3.75", "3 steps in a row", "rollout.dtype", "null turns"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "mean", "broken", "ends"),
    [
        (["algorithm.max_mismatch_steps=1"], 0.21, 0.0, True),
        (["algorithm.max_mismatch_steps=1"], 0.2, 0.0, False),
        (["algorithm.max_mismatch_steps=1"], 0.0, 1.0, True),
        (["algorithm.max_mismatch_steps=1", "algorithm.max_mismatch=3"], 2.9, 0.0, False),
        (["algorithm.max_mismatch_steps=1", "algorithm.max_mismatch=null"], 9.0, 9.0, False),
        (["algorithm.max_mismatch_steps=1", "rollout.name=fake"], 9.0, 0.0, False),
    ],
)
def test_what_counts_as_above(tmp_path: Path, settings: list[str], mean: float, broken: float, ends: bool) -> None:
    guard = _guard(tmp_path, *settings)
    if not ends:
        guard.look(1, _metrics(mean, broken))
        return
    with pytest.raises(RolloutError, match=r"algorithm\.max_mismatch"):
        guard.look(1, _metrics(mean, broken))


@pytest.mark.parametrize("setting", ["max_mismatch=0", "max_mismatch=-1", "max_mismatch=inf", "max_mismatch_steps=0"])
def test_bounds_that_bound_nothing_are_refused(tmp_path: Path, setting: str) -> None:
    fault = only_fault(tmp_path, f"algorithm.{setting}")
    assert fault.key == f"algorithm.{setting.partition('=')[0]}" and "write" in fault.cure


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_n8_log_probabilities_that_are_not_finite_are_counted_apart(value: float) -> None:
    """N8: one broken token does not hide what the others say, and is not hidden by them."""
    found = mismatch_metrics(torch.tensor([-1.0, -2.0, value]), torch.tensor([-1.5, -2.5, -1.0]))
    assert found["mismatch/nonfinite_tokens"] == 1 and found["mismatch/abs_mean"] == pytest.approx(0.5)
    assert mismatch_metrics(torch.tensor([value]), torch.tensor([-1.0])) == {"mismatch/nonfinite_tokens": 1.0}


@pytest.mark.parametrize(
    ("needs_old", "kept", "passed"),
    [
        (False, [True, True, True], None),
        (True, [False, False, False], None),
        (False, [True, False, True], (((((), (1,)),),))),
        (False, [False, False, False], (((((0,), (1, 2)),),))),
    ],
)
def test_n8_sequences_that_an_on_policy_update_leaves_out_get_a_pass_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_old: bool, kept: list[bool], passed: Any
) -> None:
    """N8: also where nothing is kept, and so nothing is updated."""
    seen: list[BatchPlan] = []
    models = Models(load(tmp_path, f"algorithm.rollout_correction.rollout_is={'token' if needs_old else 'null'}"))
    monkeypatch.setattr(models, "forward", lambda plan, role, into: seen.append(plan))
    column = passes.measure_left_out(models, BatchPlan(((((0,), (1, 2)),),)), torch.tensor(kept))
    assert seen == ([] if passed is None else [BatchPlan(passed)])
    assert column == ("old_logprobs" if needs_old else "train_logprobs")


@pytest.mark.parametrize("settings", [[], PPO])
def test_n8_the_step_of_every_algorithm_looks_at_the_mismatch(tmp_path: Path, settings: list[str]) -> None:
    """N8: a trainer without data and workers, whose flow reads metrics above the bound."""
    trainer = Trainer(load(tmp_path, "algorithm.max_mismatch_steps=1", *settings))
    trainer.flow.watch([Node("mismatch", lambda: _metrics(1.0))])
    names = frozenset(node.name for node in trainer.flow.nodes)
    learned = PartialRun({}, names, dict.fromkeys(names, (0.0, 1.0)))
    with pytest.raises(RolloutError, match=r"step 7.*algorithm\.max_mismatch"):
        trainer.publish(StepUnderWay(7, 6, learned, 0.0))


def test_the_line_of_a_step_shows_what_goes_wrong_quietly() -> None:
    metrics = {
        "reward/mean": 0.5,
        "reward/failed": 3.0,
        "length/prompt_mean": 5.0,
        "length/response_mean": 3.0,
        "length/cut_share": 0.125,
        "mismatch/abs_mean": 0.00413,
        "trainer/nonfinite_skips": 2.0,
        "memory/peak_gib": 3.14,
        "perf/left_s": 3725.4,
    }
    line = step_line(2, 9, metrics)
    assert line == (
        "step 2/9  reward 0.500  failed 3  mismatch 0.0041  skipped 2 mini-batches so far  len 5.0+3.0  cut 12.5%  "
        "mem 3.1 GiB  left 1:02:05"
    )


def test_nothing_that_went_wrong_is_shown_as_nothing_too() -> None:
    """A reader sees that failures are counted; skips are shown once there are any."""
    line = step_line(1, 2, {"reward/mean": 0.5, "reward/failed": 0.0, "trainer/nonfinite_skips": 0.0})
    assert line == "step 1/2  reward 0.500  failed 0"
