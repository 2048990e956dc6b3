"""The controller's view of a batch: facts of sequences dealt out to the ranks that hold them, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.learning.batch import Batch, plan_roles
from tests.helpers.config import load


@settings(max_examples=50, deadline=None)
@given(owners=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), max_size=9))
def test_what_is_split_comes_back_in_order(owners: list[tuple[int, int]]) -> None:
    """Facts of sequences, and columns of tokens; a rank may have no sequence."""
    lens = tuple(length for length, _ in owners)
    numbers = tuple(tuple(s for s, (_, rank) in enumerate(owners) if rank == dp) for dp in range(3))
    ids = torch.arange(len(lens))
    batch = Batch(lens, torch.tensor(lens), numbers, ids, torch.zeros(len(lens), dtype=torch.bool), list)
    assert torch.equal(batch.join(batch.split(ids)), ids)
    tokens = torch.arange(float(sum(lens)))
    split = batch.split_tokens(tokens)
    assert [len(part) for part in split] == [sum(lens[s] for s in of_rank) for of_rank in numbers]
    assert torch.equal(batch.join_tokens(split), tokens)


def test_actor_and_critic_find_their_sequences_on_one_rank(tmp_path: Path) -> None:
    """Mini-batches of 6 and of 4 prompts: each plan has all sequences, each on the rank that holds it."""
    cfg = load(tmp_path, "cluster.n_gpus_per_node=2")
    lens = [3 + 5 * s % 17 for s in range(24)]
    roles = [(cfg.actor_training, [s // size for s in range(24)]) for size in (6, 4)]
    plans, numbers = plan_roles(cfg, lens, roles)
    assert sorted(s for of_rank in numbers for s in of_rank) == list(range(24))
    for plan in plans:
        for of_rank, micros in zip(numbers, plan.passes(), strict=True):
            assert sorted(s for micro in micros for s in micro) == list(of_rank)


@settings(max_examples=40, deadline=None)
@example(lens=[24, 1] * 8, micro_batch_size=None, layout=["actor.packing=false"])
@given(
    lens=st.lists(st.integers(1, 24), min_size=2, max_size=24).map(lambda lens: lens[: len(lens) // 2 * 2]),
    micro_batch_size=st.sampled_from([None, 2, 3, 5]),
    layout=st.sampled_from([[], ["actor.cp=2"], ["actor.packing=false"]]),
)
def test_sequences_of_a_row_stay_together(
    tmp_path_factory: pytest.TempPathFactory, lens: list[int], micro_batch_size: int | None, layout: list[str]
) -> None:
    """Next to each other in one micro-batch, on one rank; all sequences once, within the limits."""
    folder = tmp_path_factory.mktemp("run")
    cfg = load(folder, "cluster.n_gpus_per_node=4", "actor.max_tokens_per_gpu=64", *layout)
    role = replace(cfg.actor_training, micro_batch_size=micro_batch_size)
    (plan,), numbers = plan_roles(cfg, lens, [(role, [0] * len(lens))], together=2)
    assert sorted(s for of_rank in numbers for s in of_rank) == list(range(len(lens)))
    for of_rank, micros in zip(numbers, plan.passes(), strict=True):
        assert sorted(s for micro in micros for s in micro) == sorted(of_rank)
        for micro in micros:
            assert micro[1::2] == tuple(s + 1 for s in micro[0::2]) and all(s % 2 == 0 for s in micro[0::2])
            assert len(micro) <= (micro_batch_size or len(lens))
            tokens = [-(-lens[s] // 4) * 4 for s in micro] if cfg.actor.cp > 1 else [lens[s] for s in micro]
            size = sum(tokens) if cfg.actor.packing else len(micro) * max(tokens, default=0)
            assert size <= 64 * cfg.actor.cp
