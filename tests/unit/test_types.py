"""Flat answers of engines, and the controller's view of them."""

from __future__ import annotations

import pickle

import numpy as np

from megatron_rl.types import FINISH_REASONS, Prompt, Rollout, RolloutGroup, Rollouts, Samples, Texts
from tests.helpers.rollouts import rollouts_of


def test_samples_are_flat_and_know_their_rows():
    samples = Samples.from_lists(
        [(8, 1), (), (9, 9, 3)], [(-0.5, -1.0), (), (-2.0,) * 3], ["stop", "stop", "length"], 4
    )
    assert samples.token_ids.tolist() == [8, 1, 9, 9, 3] and samples.token_ids.dtype == np.int32
    assert samples.logprobs.tolist() == [-0.5, -1.0, -2.0, -2.0, -2.0] and samples.logprobs.dtype == np.float32
    assert samples.lens.tolist() == [2, 0, 3] and samples.finish.tolist() == [0, 0, 1]
    assert samples.oldest_version.tolist() == samples.newest_version.tolist() == [4, 4, 4]
    assert samples.id_tuples() == [(8, 1), (), (9, 9, 3)] and len(samples) == 3
    assert samples.rollout(2, "c") == Rollout((9, 9, 3), (-2.0, -2.0, -2.0), "length", "c")
    assert len(Samples.from_lists([], [], [], 0)) == 0


def test_texts_are_read_one_by_one_out_of_one_array():
    texts = Texts.of(["", "4+5=9", "\u00e9\u2211", ""])
    assert [texts[row] for row in range(len(texts))] == ["", "4+5=9", "\u00e9\u2211", ""] and len(texts) == 4
    assert len(Texts.of([])) == 0


def five_groups() -> tuple[Rollouts, list[RolloutGroup]]:
    """Two samples of each of five prompts, dealt to three engines; and what each group is."""
    groups = [
        RolloutGroup(
            Prompt(g, (3,) * (g + 1), f"p{g}", "s", None, where=f"d.jsonl row {g + 1}" if g else ""),
            tuple(
                Rollout((10 * g + k,) * (g + k), (-float(g),) * (g + k), FINISH_REASONS[k], f"text {g}/{k}")
                for k in range(2)
            ),
            7,
        )
        for g in range(5)
    ]
    return rollouts_of(groups, num_parts=3), groups


def test_rollouts_give_back_what_engines_answered_group_by_group():
    rollouts, groups = five_groups()
    assert [rollouts.fetch_group(g) for g in range(5)] == groups
    assert rollouts.fetch_text(7) == "text 3/1"
    assert rollouts.num_groups == 5 and rollouts.num_sequences == 10 and rollouts.n == 2
    assert rollouts.lens.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert rollouts.seq_lens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert rollouts.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert rollouts.was_cut.tolist() == [False, True] * 5
    assert set(rollouts.oldest_version) == set(rollouts.newest_version) == {7}
    assert rollouts.names()[1:4] == ["row 0 sample 2", "d.jsonl row 2 sample 1", "d.jsonl row 2 sample 2"]


def test_rollouts_are_chosen_and_joined_by_group_and_let_go_of_parts_that_nobody_needs():
    rollouts, groups = five_groups()
    chosen = rollouts.select([4, 1])
    assert [chosen.fetch_group(g) for g in range(2)] == [groups[4], groups[1]]
    assert len(chosen.parts) == len(chosen.texts) == 1, "prompts 1 and 4 are of one engine"
    joined = Rollouts.concat([chosen, rollouts.select([0]), rollouts.select([])])
    assert [joined.fetch_group(g) for g in range(3)] == [groups[4], groups[1], groups[0]]
    assert joined.group_ids.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_rank_fetches_its_sequences_by_reference():
    rollouts, groups = five_groups()
    refs = pickle.loads(pickle.dumps(rollouts.refs([9, 2, 3])))
    ids, logprobs = refs.fetch()
    wanted = [groups[4].rollouts[1], groups[1].rollouts[0], groups[1].rollouts[1]]
    assert [tuple(row.tolist()) for row in ids] == [rollout.token_ids for rollout in wanted]
    assert [tuple(row.tolist()) for row in logprobs] == [rollout.logprobs for rollout in wanted]
    assert refs.numbers == (9, 2, 3) and len(refs.parts) == 1
    assert [refs.prompts[p].tolist() for p in refs.prompt_of] == [[3] * 5, [3] * 2, [3] * 2]
    empty = rollouts.refs([])
    assert empty.fetch() == ([], []) and empty.prompts == () and empty.parts == ()
