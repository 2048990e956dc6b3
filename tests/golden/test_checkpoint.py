"""Today's code loads the checkpoint that was recorded when its format was new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.checkpoint import FOLDER, RECORD, checksums, go_on, model
from tests.helpers.run_ranks import run_ranks


@pytest.mark.parametrize(("world", "layout"), [(2, {"tp": 2}), pytest.param(1, {}, marks=pytest.mark.slow)])
def test_r2_a_checkpoint_of_format_1_loads(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """Weights, masters and moments to the bit; the next steps as they were, within 1e-4 relative on any machine."""
    recorded = json.loads(RECORD.read_text())
    steps = run_ranks(world, go_on, model(tmp_path / "model"), layout, str(FOLDER), str(tmp_path / "saved"))[0]
    assert checksums(tmp_path / "saved/actor") == recorded["tensors"]
    for of_step, wanted in zip(steps, recorded["steps"], strict=True):
        assert of_step == pytest.approx(wanted, rel=1e-4, abs=2e-5)
