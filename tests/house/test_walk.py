"""One step of an algorithm is followed on the controller in few files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.flow import node
from megatron_rl.trainers.grpo import advantages
from tests.helpers.config import load
from tests.house.walk import called_modules, files_of_step, function_of

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
    assert function_of(node(files_of_step, None)) is files_of_step


def test_the_walk_counts_what_a_step_function_calls_if_it_is_switched_on(tmp_path: Path) -> None:
    def called(*settings: str) -> set[str]:
        modules = called_modules(advantages, load(tmp_path, *settings))
        return {module.__name__.rpartition(".")[2] for module in modules if module is not None}

    assert called(*WHOLE) == {"scoring", "credit"}
    assert called(*WHOLE, "algorithm.filter_groups.enable=true") == {"scoring", "credit", "dynamic"}
