"""DAPO's dynamic sampling: bounded, resumable, and everything that it leaves out is counted."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.data.stream import Stream
from megatron_rl.errors import RewardError
from megatron_rl.experience.dynamic import Sampled, differing, filter_values, sample_differing
from megatron_rl.rewards.base import RewardResult
from megatron_rl.types import Prompt, Rollout, RolloutGroup, Rollouts
from tests.helpers.rollouts import rollouts_of


def _prompt(index: int) -> Prompt:
    return Prompt(index, (1,), str(index), "test", None)


def _stream(num_items: int = 40, batch_size: int = 4) -> Stream:
    return Stream(num_items=num_items, batch_size=batch_size, shuffle=True, seed=0)


def _step(stream: Stream, good: set[int], max_batches: int = 3) -> Sampled:
    """Two samples a prompt; those of the prompts in `good` score 0 and 1, the others both 0."""

    def more() -> list[Prompt]:
        return [_prompt(i) for i in stream.next()]

    def score(prompts: list[Prompt], number: int) -> tuple[Rollouts, list[RewardResult]]:
        groups = [RolloutGroup(p, (Rollout((5,), (0.0,), "stop", ""),) * 2, number) for p in prompts]
        return rollouts_of(groups), [RewardResult(float(k and p.index in good)) for p in prompts for k in range(2)]

    def differs(rollouts: object, results: list[RewardResult]) -> list[bool]:
        return differing("score", results, torch.zeros(len(results)), 2)

    return sample_differing(more(), more, score, differs, max_batches=max_batches)  # type: ignore[arg-type]


def _indices(found: Sampled) -> list[int]:
    return [prompt.index for prompt in found.rollouts.prompts]


def test_one_batch_is_enough_where_all_groups_differ() -> None:
    stream = _stream()
    found = _step(stream, good=set(range(40)))
    assert found.rollouts.num_groups == 4 and stream.position == 4
    assert found.sampling == {
        "sampling/batches": 1, "sampling/prompts": 4, "sampling/flat": 0, "sampling/surplus": 0, "sampling/filled": 0,
    }  # fmt: skip


def test_further_batches_take_the_places_of_flat_groups() -> None:
    """R6: what is sampled and not used is counted: flat groups, and differing ones beyond the step's number."""
    order = _stream().next() + (second := _stream_skipping(4).next())
    good = {order[1], *second}
    found = _step(_stream(), good)
    assert _indices(found) == [order[1], *second[:3]]
    assert found.sampling == {
        "sampling/batches": 2, "sampling/prompts": 8, "sampling/flat": 3, "sampling/surplus": 1, "sampling/filled": 0,
    }  # fmt: skip
    assert [result.value for result in found.results] == [0.0, 1.0] * 4


def _stream_skipping(items: int) -> Stream:
    stream = _stream()
    while stream.position < items:
        stream.next()
    return stream


def test_sampling_is_bounded_and_the_step_keeps_its_shape() -> None:
    """No group differs: three batches and no more; flat groups fill the step, for the trainer to leave out."""
    stream = _stream()
    found = _step(stream, good=set())
    assert stream.position == 12 and found.rollouts.num_groups == 4 and len(found.results) == 8
    assert found.sampling["sampling/batches"] == 3 and found.sampling["sampling/filled"] == 4
    assert found.sampling["sampling/flat"] == 8, "those that were left out"


def test_r1_sampling_goes_on_from_the_position_in_the_data_alone() -> None:
    """R1: a run that stops after any step and goes on from the stream's state sees the same groups."""
    good = {i for i in range(40) if i % 3}
    whole = _stream()
    wanted = [_indices(_step(whole, good)) for _ in range(6)]
    stream = _stream()
    found = []
    for _ in range(6):
        found.append(_indices(_step(stream, good)))
        state, stream = stream.state(), _stream()
        stream.restore(state)
    assert found == wanted


def test_the_metric_of_the_filter() -> None:
    results = [RewardResult(1.0, {"acc": 0.0, "f1": 0.5}), RewardResult(0.0, {"f1": 0.25})]
    penalties = torch.tensor([-0.5, 0.0])
    assert filter_values("score", results, penalties).tolist() == [1.0, 0.0]
    assert filter_values("acc", results, penalties).tolist() == [0.0, 0.0]
    assert filter_values("seq_reward", results, penalties).tolist() == [0.5, 0.0]
    assert filter_values("f1", results, penalties).tolist() == [0.5, 0.25]
    with pytest.raises(RewardError, match=r"'bleu'.*known: score, seq_reward, acc, f1"):
        filter_values("bleu", results, penalties)
