"""Keys of checkpoints and of resuming, and verl's for the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.durations import seconds_of
from tests.helpers.config import load, only_fault


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("3:50:00", 13800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("", None),
        ("1:2:3:4", None),
        ("-5", None),
        ("2h", None),
    ],
)
def test_a_length_of_time_is_read_as_slurm_reads_it(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["two hours", "0:00:00", "'0'"])
def test_a_limit_that_is_no_length_of_time_is_refused(tmp_path: Path, text: str) -> None:
    fault = only_fault(tmp_path, f"trainer.max_time={text}")
    assert fault.key == "trainer.max_time" and "3:50:00" in fault.cure


def test_a_best_metric_of_a_validation_that_never_is_is_refused(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "checkpoint.keep_best=val/accuracy")
    assert fault.key == "checkpoint.keep_best" and "does not validate" in fault.reason


def test_defaults(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    assert (cfg.trainer.resume_mode, cfg.checkpoint.freq, cfg.checkpoint.keep_last) == ("auto", None, 2)


def test_restarts_need_workers_in_processes_of_their_own(tmp_path: Path) -> None:
    assert load(tmp_path, "trainer.max_restarts=2").trainer.max_restarts == 2
    fault = only_fault(tmp_path, "trainer.max_restarts=2", "cluster.backend=inline")
    assert fault.key == "trainer.max_restarts" and "cluster.backend=inline" in fault.reason
