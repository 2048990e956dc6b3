"""One step of an algorithm is followed on the controller in few files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.flow import node
from tests.helpers.config import load
from tests.house.walk import files_of_step, module_of

MOST_FILES, MOST_LINES, MOST_LINES_OF_FLOW = 5, 700, 120
# Every optional node: old and reference log-probabilities.
WHOLE = ("algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true", "actor.ppo_epochs=2")


def test_one_grpo_step_is_in_five_files(tmp_path: Path, house_figure: Callable[[str, float, float], None]) -> None:
    walk = files_of_step(load(tmp_path, *WHOLE))
    first, *_ = walk
    house_figure("files of one GRPO step", len(walk), MOST_FILES)
    house_figure("lines of one GRPO step", sum(walk.values()), MOST_LINES)
    assert first.name == "grpo.py" and walk[first] < MOST_LINES_OF_FLOW
    assert len(walk) <= MOST_FILES and sum(walk.values()) <= MOST_LINES, walk


def test_the_walk_sees_through_what_is_bound() -> None:
    module = module_of(node(files_of_step, None))
    assert module is not None and module.__name__ == "tests.house.walk"
