"""The counts of validations without an improvement."""

from __future__ import annotations

import pytest

from megatron_rl.config.sections.trainer import EarlyStopConfig
from megatron_rl.runs.early_stop import EarlyStop

NAN = float("nan")


def counted(cfg: EarlyStopConfig, values: list[float]) -> EarlyStop:
    early_stop = EarlyStop(cfg)
    for number, value in enumerate(values):
        early_stop.note(10 * number, {"val/loss": value})
        # A validation that a resumed run sees once more.
        early_stop.note(10 * number, {"val/loss": value})
        early_stop.note(10 * number + 1, {"reward/mean": 1.0})
    return early_stop


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.1, 3.0, 2.0, 2.0], ""),
        ([0.1, 3.0, 2.0, 2.0, 2.5], "was best at step 20 (2), and the 2 validations since"),
        ([0.1, 3.0, 2.0, 1.95, 2.5], "was best at step 20 (2), and the 2 validations since"),
        ([0.1, 3.0, 2.0, 2.5, 1.5, NAN], ""),
        ([0.1, 3.0, NAN, NAN], "was best at step 10 (3)"),
        ([0.1, NAN, NAN], "never had a finite value, and 2 validations"),
    ],
)
def test_patience_is_counted_in_validations(values: list[float], ends: str) -> None:
    cfg = EarlyStopConfig(metric="val/loss", patience=2, min_delta=0.1)
    early_stop = counted(cfg, values)
    assert bool(early_stop.ends) == bool(ends) and ends in early_stop.ends
    assert EarlyStop(cfg, early_stop.state()).ends == early_stop.ends
    assert not EarlyStop(EarlyStopConfig(metric="val/accuracy", patience=2), early_stop.state()).ends
