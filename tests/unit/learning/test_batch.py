"""The controller's view of a batch: facts of sequences dealt out to the ranks that hold them, and back."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
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
