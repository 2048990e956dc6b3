"""The batch that lives on a data-parallel rank: what goes in comes out under the same number and name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_rl.errors import FlowError
from megatron_rl.rollout.engine import compact_experts
from megatron_rl.types import Column, Samples, SequenceRefs
from megatron_rl.workers.rank_batch import RankBatch, end_to_end, masked_sequences


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def _batch() -> RankBatch:
    """Sequences 7, 2 and 5 of a step: prompts [5 6] and [4], the second with two responses."""
    responses = [_ids(8, 1), _ids(1, 0, 1), _ids(9)]
    logprobs = [np.array(row, np.float32) for row in ((-0.5, -0.25), (-1, -2, -3), (-4,))]
    return RankBatch((7, 2, 5), end_to_end([_ids(5, 6), _ids(4)], [0, 1, 1], responses, logprobs))


def test_n6_every_sampled_id_is_kept_and_only_prompts_are_masked() -> None:
    """N6: ids as sampled, whatever they are: pad, several ends, none."""
    batch = _batch()
    assert batch.tokens.tolist() == [5, 6, 8, 1, 4, 1, 0, 1, 4, 9]
    assert batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, True, True, False, True]
    assert batch.column("rollout_logprobs").tolist() == [0, 0, -0.5, -0.25, 0, -1, -2, -3, 0, -4]
    assert batch.seq_lens == (4, 4, 2)


def test_a_rank_without_sequences_has_an_empty_batch() -> None:
    batch = RankBatch((), end_to_end([], [], [], []))
    batch.put("values", torch.zeros(0))
    batch.write("old_logprobs", ((), ()), [torch.zeros(0), torch.zeros(0)])
    assert [micro.num_tokens for micro in batch.micros(((), ()), {"values": "values"})] == [0, 0]
    assert batch.sums(batch.column("values")).tolist() == []


def test_micro_batches_are_chosen_by_number_and_columns_by_the_name_that_the_loss_has_for_them() -> None:
    batch = _batch()
    (micro, empty) = batch.micros(((5, 7), ()), {"old_logprobs": "rollout_logprobs"})
    assert micro.tokens.tolist() == [4, 9, 5, 6, 8, 1] and micro.seq_lens == (2, 4)
    assert micro.columns.keys() == {"old_logprobs"}
    assert micro.columns["old_logprobs"].tolist() == [0, -4, 0, 0, -0.5, -0.25]
    assert empty.num_sequences == 0


def test_what_passes_write_piece_by_piece_is_one_column() -> None:
    """Each sequence keeps what was written of it last; one that no pass saw has 0."""
    batch = _batch()
    batch.write("train_logprobs", ((5,), (7,)), [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 2.0, 3.0])])
    assert batch.column("train_logprobs").tolist() == [0, 0, 2, 3, 0, 0, 0, 0, 0, 1]
    batch.write("train_logprobs", ((2,),), [torch.tensor([0.0, 4.0, 5.0, 6.0])])
    batch.write("train_logprobs", (), [])
    assert batch.column("train_logprobs").tolist() == [0, 0, 2, 3, 0, 4, 5, 6, 0, 1]


def test_a_column_that_is_put_counts_on_trained_tokens_alone() -> None:
    batch = _batch()
    batch.put("values", torch.ones(10))
    assert torch.equal(batch.column("values"), batch.loss_mask.float())
    assert batch.sums(torch.arange(10.0)).tolist() == [5.0, 18.0, 9.0]


def test_a_column_that_nothing_wrote_is_named_with_those_that_there_are() -> None:
    with pytest.raises(FlowError, match=r"no column 'ref_logprobs'; it has: rollout_logprobs -- run the pass"):
        _batch().micro((7,), {"ref_logprobs": "ref_logprobs"})


def test_sequences_with_numbers_that_are_not_finite_are_named() -> None:
    """Of the sequences asked for; an entry off the mask is no number of the loss."""
    batch = _batch()
    batch.write("advantages", ((7, 2, 5),), [torch.tensor([0, 0, 1, 1, torch.nan, 1, torch.inf, 1, 0, torch.nan])])
    columns: dict[str, Column] = {"advantages": "advantages", "old_logprobs": "rollout_logprobs"}
    assert batch.not_finite(columns, (7, 2, 5)) == {"advantages": (2, 5)}
    assert batch.not_finite(columns, (7, 2)) == {"advantages": (2,)}
    assert batch.not_finite(columns, (7,)) == {}


def test_sequences_with_a_mask_of_their_own_never_train_on_their_first_token() -> None:
    batch = masked_sequences(
        [_ids(3, 4), _ids(5), _ids(6, 7, 8)], [np.array(m, np.bool_) for m in ([1, 1], [1], [0, 1, 1])]
    )
    assert batch.tokens.tolist() == [3, 4, 5, 6, 7, 8] and batch.seq_lens == (2, 1, 3)
    assert batch.loss_mask.tolist() == [False, True, False, False, True, True]


@dataclass(frozen=True)
class _Here:
    """A handle to what is in this process."""

    samples: Samples

    def fetch(self) -> Samples:
        return self.samples


@pytest.mark.parametrize(("largest", "dtype"), [(254, torch.uint8), (255, torch.int16)])
def test_experts_of_engines_reach_the_tokens_that_they_were_chosen_for(largest: int, dtype: torch.dtype) -> None:
    """Prompts and responses; not the last token of a sequence, nor layers without experts. Numbered from 1."""
    # [rows, 2 layers, 1 expert]; layer 0 has no experts.
    tables = [np.array([[[-1], [row]] for row in rows]) for rows in ((0, 1, 2), (largest,))]
    samples = Samples.from_lists([[8, 1], [9]], [[0.0, 0.0], [0.0]], ["stop"] * 2, 0, compact_experts(tables))
    other = Samples.from_lists([[3]], [[0.0]], ["stop"], 0)
    refs = SequenceRefs(
        numbers=(4, 6, 5),
        prompts=(_ids(5, 6), _ids(4)),
        prompt_of=_ids(1, 0, 1),
        parts=(_Here(samples), _Here(other)),
        part_of=_ids(0, 0, 1),
        row_of=_ids(1, 0, 0),
    )
    batch = RankBatch.load(refs)
    (micro,) = batch.micros(((6, 4, 5),), replay=True)
    assert micro.routed is not None and micro.routed.dtype == dtype and micro.routed.shape == (8, 2, 1)
    assert micro.routed[:, 1, 0].tolist() == [1, 2, 3, 0, largest + 1, 0, 0, 0]
    assert not micro.routed[:, 0].any()
    assert batch.micro((6,)).routed is None, "nothing is replayed that nobody asked for"


def test_experts_that_a_pass_chose_are_those_that_an_update_repeats() -> None:
    batch = _batch()
    with pytest.raises(FlowError, match="no choices of experts to replay"):
        batch.micros(((7,),), replay=True)
    chosen = torch.arange(1, 7).view(6, 1, 1)
    # The second micro-batch is padding, and knows of no experts.
    batch.write_routed(((5, 7), ()), [chosen.to(torch.uint8), torch.zeros(0, 1, 0, dtype=torch.uint8)])
    batch.write_routed(((2,),), [torch.full((4, 1, 1), 300, dtype=torch.int16)])
    micro = batch.micro((7, 5, 2), replay=True)
    assert micro.routed is not None
    assert micro.routed.reshape(-1).tolist() == [3, 4, 5, 6, 1, 2, 300, 300, 300, 300]
