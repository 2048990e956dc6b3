"""The batch as the controller calls it on a rank: loaded by reference, columns by name, nothing off the last stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algos.gae import alone
from megatron_rl.cluster.handles import hand_over
from megatron_rl.errors import FlowError
from megatron_rl.types import Samples, SequenceRefs
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.rank_batch import MaskedSequences
from megatron_rl.workers.token_work import MiniBatches
from tests.helpers.config import load


def _refs() -> SequenceRefs:
    """Sequences 3 and 0 of a step: the second and the first sample of one engine, to one prompt."""
    samples = Samples.from_lists([[8, 1], [9, 9, 3]], [[-0.5, -0.25], [-1, -2, -3]], ["stop", "length"], 0)
    rows = np.array([1, 0], np.int32)
    prompt = np.array([5, 6], np.int32)
    return SequenceRefs((3, 0), (prompt,), np.zeros(2, np.int32), (hand_over(samples),), np.zeros(2, np.int32), rows)


def test_a_rank_fetches_its_sequences_by_reference(tmp_path: Path) -> None:
    worker = BatchWorker(load(tmp_path), alone, has_columns=True)
    worker.load(_refs())
    (micro,) = worker.micros(((0, 3),), {"old_logprobs": "rollout_logprobs"})
    assert micro.tokens.tolist() == [5, 6, 8, 1, 5, 6, 9, 9, 3] and micro.seq_lens == (4, 5)
    assert micro.columns["old_logprobs"].tolist() == [0, 0, -0.5, -0.25, 0, 0, -1, -2, -3]
    assert worker.sums(["rollout_logprobs"])["rollout_logprobs"].tolist() == [-6.0, -0.75]
    worker.put(torch.ones(9), "values")
    assert worker.fetch("values").tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_sequences_with_masks_are_weighed(tmp_path: Path) -> None:
    """Supervised fine-tuning: a mean over all trained tokens of the mini-batch."""
    worker = BatchWorker(load(tmp_path, "actor.loss_agg_mode=token-mean"), alone, has_columns=True)
    worker.load(MaskedSequences((0,), (np.array([4, 5, 6], np.int32),), (np.array([True, True, True]),)))
    worker.weigh(MiniBatches(torch.zeros(1, dtype=torch.int64), 1))
    assert worker.fetch("loss_weights").tolist() == [0, 0.5, 0.5]


def test_a_rank_of_another_stage_has_tokens_alone(tmp_path: Path) -> None:
    """It makes the same passes, and has no part in work on columns: whose numbers it was never given."""
    worker = BatchWorker(load(tmp_path), _no_sums, has_columns=False)
    worker.load(_refs())
    (micro,) = worker.micros(((3,),), {"old_logprobs": "ref_logprobs"})
    assert micro.num_tokens == 5 and micro.columns == {}
    worker.write("old_logprobs", ((3,),), [])
    worker.weigh(MiniBatches(torch.zeros(2, dtype=torch.int64), 1))
    assert worker.compare("old_logprobs") == {} and worker.not_finite((3,), {"old_logprobs": "old_logprobs"}) == {}
    assert worker.sums(["old_logprobs"]) == {} and len(worker.kl_sums("k1")) == 0


def _no_sums(values: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a collective on a rank that the others do not wait for")


def test_work_before_a_batch_is_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="no batch is on the ranks yet -- load one first"):
        BatchWorker(load(tmp_path), alone, has_columns=True).compare("old_logprobs")
