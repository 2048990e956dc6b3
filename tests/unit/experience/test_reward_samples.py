"""What rewards are given of a step: made one by one, from parts that lie elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_rl.experience.reward_samples import RolloutSamples
from megatron_rl.types import Handle, Prompt, Rollout, RolloutGroup, Rollouts
from tests.helpers.rollouts import rollouts_of


@dataclass(frozen=True, eq=False)
class Counted:
    """A handle that counts how often it is fetched."""

    inner: Handle[Any]
    fetches: list[int] = field(default_factory=list)

    def fetch(self) -> Any:
        self.fetches.append(1)
        return self.inner.fetch()


def four_groups() -> Rollouts:
    """Two samples of each of four prompts from two engines."""
    groups = [
        RolloutGroup(
            Prompt(g, (3, g), f"p{g}", "ab"[g % 2], str(g), where=f"row {g}"),
            (Rollout((g, 1), (0.0,) * 2, "stop", f"{g}/0"), Rollout((g,), (0.0,), "length", f"{g}/1")),
            0,
        )
        for g in range(4)
    ]
    rollouts = rollouts_of(groups, num_parts=2)
    return replace(rollouts, parts=tuple(map(Counted, rollouts.parts)), texts=tuple(map(Counted, rollouts.texts)))


def test_samples_are_those_of_the_sequences_in_order():
    samples = RolloutSamples(four_groups(), with_ids=True)
    assert len(samples) == 8
    assert [one.solution_str for one in samples] == [f"{g}/{k}" for g in range(4) for k in range(2)]
    last = samples[7]
    assert (last.data_source, last.prompt_text, last.ground_truth, last.where) == ("b", "p3", "3", "row 3")
    assert (last.num_tokens, last.finish_reason) == (1, "length")
    assert (
        list(last.prompt_ids) == [3, 3] and list(last.response_ids) == [3] and list(samples[6].response_ids) == [3, 1]
    )
    assert [one.solution_str for one in samples[1::4]] == ["0/1", "2/1"]
    with pytest.raises(IndexError):
        samples[8]


def test_texts_are_fetched_a_part_at_a_time_and_ids_only_for_those_who_read_them():
    rollouts = four_groups()
    samples = RolloutSamples(rollouts, with_ids=False)
    assert all(not one.response_ids for one in samples)
    assert sum(len(handle.fetches) for handle in rollouts.texts if isinstance(handle, Counted)) == 4, "one a group"
    assert sum(len(handle.fetches) for handle in rollouts.parts if isinstance(handle, Counted)) == 0
