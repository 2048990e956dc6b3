"""Today's code trains as the recorded code did (trajectories.py says how to record, and when)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.trajectories import CLASSES, RECORD, STEPS, run

# A class is every layout that must give its numbers: one rank, and one of several ranks and small micro-batches.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-rank": (1, {}),
    "dp2-micro-batches-of-two": (2, {"ppo_micro_batch_size_per_gpu": 2}),
}


def test_every_class_is_recorded() -> None:
    assert json.loads(RECORD.read_text()).keys() == CLASSES.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CLASSES)
def test_n2_trajectories_equal_the_recorded_ones(name: str, layout: str) -> None:
    """N2: loss and grad norm of 8 steps, within 1e-4 relative on any machine."""
    world, axes = LAYOUTS[layout]
    recorded = json.loads(RECORD.read_text())[name]
    assert len(recorded) == STEPS and recorded[-1][0] < recorded[0][0], "the recorded run learns"
    for found, wanted in zip(run(name, axes, world), recorded, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=2e-5)
