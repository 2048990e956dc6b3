"""What ranks compute of their own sequences equals what one rank computes of all (contract N2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.algos.correction import correct_rollouts, mismatch_metrics, order_statistics
from megatron_rl.algos.gae import Sums, alone, whiten
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.values import value_metrics
from megatron_rl.parallel.collectives import adder
from megatron_rl.types import TrainBatch
from tests.helpers.run_ranks import run_ranks

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CORRECTION: dict[str, Any] = {"weight_high": 1.5, "weight_low": 0.8, "reject_high": 1.3, "reject_low": 0.7}
# The second rank of three has no sequences; the last mini-batch lies on one rank alone.
RANK_OF = (0, 2, 0, 2, 2, 0, 0)
MINI_OF = (0, 0, 0, 0, 1, 1, 2)


def step_batch() -> TrainBatch:
    """Seven sequences, every fourth token no response but for last ones, columns drawn at random."""
    lens = (5, 9, 3, 12, 7, 4, 6)
    generator = torch.Generator().manual_seed(7)
    total = sum(lens)
    columns = {
        name: torch.randn(total, generator=generator) for name in ("train", "rollout", "values", "returns", "rewards")
    }
    mask = torch.arange(total) % 4 != 0
    mask[torch.cumsum(torch.tensor(lens), 0) - 1] = True
    return TrainBatch(torch.zeros(total, dtype=torch.int64), lens, mask, columns)


def per_token_work(batch: TrainBatch, minis: torch.Tensor, add_up: Sums) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns [T] of these sequences, and figures of all."""
    mask, segments, count, columns = batch.loss_mask, batch.segments, batch.num_sequences, batch.columns
    made, figures = {}, {}
    for mode in MODES:
        made[mode] = loss_weights(
            mode, mask, segments, count, 16, mini_of=minis, num_minis=int(max(MINI_OF)) + 1, add_up=add_up
        )
    made["whitened"] = whiten(columns["rewards"], mask, add_up=add_up)
    made["scaled"] = whiten(columns["rewards"], mask, shift_mean=False, add_up=add_up)
    made["flat"] = whiten(torch.full_like(columns["rewards"], 0.1), mask, add_up=add_up)
    for weights, reject in (("token", "sequence"), ("icepop", "token"), ("sequence", "geometric")):
        found = correct_rollouts(
            columns["train"],
            columns["rollout"],
            mask,
            segments,
            count,
            weights=weights,
            reject=reject,
            veto_below=0.05,
            add_up=add_up,
            **CORRECTION,
        )
        assert found.weights is not None
        made |= {f"{weights} weights": found.weights, f"{reject} kept": found.kept}
        figures |= {f"{weights} {reject} {name}": value for name, value in found.metrics.items()}
    figures |= mismatch_metrics(columns["train"][mask], columns["rollout"][mask], add_up)
    figures |= value_metrics(columns["values"], columns["returns"], mask, add_up)
    return made, figures


def on_rank(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The work of one rank of three on its share."""
    mine = [s for s, owner in enumerate(RANK_OF) if owner == rank]
    add_up = adder(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    return per_token_work(step_batch().select(mine), torch.tensor(MINI_OF)[mine], add_up)


def test_n2_per_token_work_on_three_ranks_equals_one() -> None:
    """N2: loss weights, whitening, rollout correction, mismatch and the critic's figures; one rank has no sequence."""
    wanted, figures = per_token_work(step_batch(), torch.tensor(MINI_OF), alone)
    assert bool((wanted["flat"] == 0).all())
    for rank, (made, found) in enumerate(run_ranks(3, on_rank)):
        mine = [s for s, owner in enumerate(RANK_OF) if owner == rank]
        for name, column in wanted.items():
            own = step_batch().with_(wanted=column).select(mine).columns["wanted"]
            assert torch.allclose(made[name].double(), own.double(), rtol=1e-6, atol=1e-9), (rank, name)
        assert found == pytest.approx(figures, rel=1e-12), rank


def test_the_place_of_a_value_is_found_from_its_bits() -> None:
    """Exact: ties, zeros, subnormal numbers and the largest float32."""
    values = torch.cat([torch.rand(999), torch.tensor([0.0, 0.0, 1e-40, 1.0, 1.0, 3.4e38])])
    places = [1, 2, 3, 500, 999, 1003, 1004, 1005]
    assert order_statistics(values, places) == values.sort().values[torch.tensor(places) - 1].tolist()
