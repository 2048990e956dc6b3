"""What of a run has a state is in one list, and comes back from plain values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.data.stream import Stream
from megatron_rl.errors import CheckpointError
from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.runs.state import RunState, stateful_parts
from megatron_rl.trainers.parts import Parts
from tests.helpers.config import load


def parts_of(folder: Path) -> Parts:
    """Parts with a place in their data."""
    parts = Parts(load(folder, "algorithm.kl_ctrl.type=adaptive"))
    parts.prompts.stream = Stream(num_items=10, batch_size=3, shuffle=True, seed=0)
    return parts


def test_every_part_with_a_state_is_listed(tmp_path: Path) -> None:
    """Also what a part holds itself: one that is added to a run and forgotten here is found."""
    parts = parts_of(tmp_path)
    inside = [value for part in vars(parts).values() for value in vars(part).values() if hasattr(part, "__dict__")]
    own = [part for part in [*vars(parts).values(), *inside] if hasattr(part, "state") and hasattr(part, "restore")]
    listed = list(stateful_parts(parts).values())
    # A stream is the state of its data, and what other kinds of runs read is not read.
    known = [*listed, parts.samples, parts.preferences, parts.references, parts.prompts.stream]
    assert own and all(any(part is one for one in known) for part in own), [type(part).__name__ for part in own]


def test_a_restored_run_goes_on_with_the_numbers_that_it_had(tmp_path: Path) -> None:
    parts, buffer = parts_of(tmp_path), RolloutBuffer[int](0)
    state = RunState({**stateful_parts(parts), "buffer": buffer})
    state.step = 7
    parts.sampler.version, parts.models.guard.skips, parts.mismatch.above = 7, 2, 1
    parts.kl_control.coef = 0.25
    parts.loss_average.observe(1.5)
    assert parts.prompts.stream is not None
    parts.prompts.stream.next()
    buffer.advance(7)
    saved = json.loads(json.dumps(state.state()))
    fresh, fresh_buffer = parts_of(tmp_path), RolloutBuffer[int](0)
    resumed = RunState({**stateful_parts(fresh), "buffer": fresh_buffer})
    resumed.restore(saved)
    assert resumed.state() == state.state() and resumed.step == 7
    assert fresh.prompts.stream is not None and fresh.prompts.stream.next() == parts.prompts.stream.next()
    assert torch.tensor(fresh.kl_control.coef) == 0.25


def test_a_checkpoint_of_another_kind_of_run_changes_nothing(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    state = RunState(stateful_parts(parts))
    saved = state.state()
    saved["parts"]["sampler"] = {"version": 9}
    saved["parts"]["turns"] = saved["parts"].pop("mismatch")
    with pytest.raises(CheckpointError, match=r"parts without a state in it: \['mismatch'\].*\['turns'\]"):
        state.restore(saved)
    assert parts.sampler.version == 0
