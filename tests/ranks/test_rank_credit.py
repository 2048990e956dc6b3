"""Credit on data-parallel ranks equals credit on one rank that holds every sequence (contract N2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_rl.algos.estimators.base import SequenceEstimator
from megatron_rl.algos.gae import Sums, alone
from megatron_rl.config.run import RunConfig
from megatron_rl.parallel.collectives import adder
from megatron_rl.types import Column, TrainBatch
from megatron_rl.workers.rank_batch import RankBatch
from megatron_rl.workers.token_work import CreditReport, MiniBatches, SequenceFacts, compare, credit, kl_sums
from tests.helpers.config import load
from tests.helpers.run_ranks import run_ranks
from tests.ranks.test_token_work import MINI_OF, RANK_OF, step_batch

CORRECTION = "algorithm.rollout_correction."
SETTINGS = {
    "ppo": [
        "algorithm.name=ppo",
        "critic.enable=true",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.lam=0.9",
    ],
    "reinforce++": ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
    "grpo": [f"{CORRECTION}rollout_rs=token", f"{CORRECTION}rollout_is=token"],
}
WRITTEN: tuple[Column, ...] = ("advantages", "loss_weights", "returns", "critic_weights", "rollout_weights", "kl")


def _facts(cfg: RunConfig) -> SequenceFacts:
    """The third sequence leaves the update, the fifth was cut."""
    minis = MiniBatches(torch.tensor(MINI_OF), 3)
    of_sequence = torch.linspace(-1, 1, 7, dtype=torch.float64)
    return SequenceFacts(
        scores=of_sequence,
        counted=torch.arange(7) != 2,
        kept=(torch.arange(7) != 2) & (torch.arange(7) != 4),
        minis=minis,
        critic_minis=MiniBatches(torch.tensor([s // 2 for s in range(7)]), 4) if cfg.needs.critic else None,
        advantages=2 * of_sequence if isinstance(cfg.algorithm.adv_estimator, SequenceEstimator) else None,
    )


@dataclass(frozen=True)
class Outcome:
    """What a rank has after credit."""

    report: CreditReport
    columns: dict[str, torch.Tensor]
    mismatch: dict[str, float]
    kl: torch.Tensor


def _credit(cfg: RunConfig, numbers: list[int], add_up: Sums) -> Outcome:
    own = step_batch().select(numbers)
    batch = RankBatch(numbers, TrainBatch(own.tokens, own.seq_lens, own.loss_mask))
    made: dict[Column, str] = {
        "old_logprobs": "train",
        "rollout_logprobs": "rollout",
        "ref_logprobs": "returns",
        "values": "values",
    }
    for column, name in made.items():
        batch.put(column, own.columns[name])
    kl, coef = kl_sums(batch, "k3"), 0.1 if cfg.algorithm.use_kl_in_reward else 0.0
    report = credit(batch, _facts(cfg).select(numbers), cfg, coef, add_up)
    columns = {name: batch.column(name) for name in WRITTEN if name in batch}
    return Outcome(report, columns, compare(batch, "old_logprobs", add_up), kl)


def credit_on_rank(rank: int, world: int, configs: list[RunConfig]) -> list[Outcome]:
    """On one rank of three, for every config."""
    add_up = adder(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    return [_credit(cfg, _numbers(rank), add_up) for cfg in configs]


def _numbers(rank: int) -> list[int]:
    return [s for s, owner in enumerate(RANK_OF) if owner == rank]


def test_n2_credit_on_three_ranks_equals_one(tmp_path: Path) -> None:
    """N2: columns, kept sequences and metrics; one rank has no sequence."""
    configs = [load(tmp_path / name, *settings) for name, settings in SETTINGS.items()]
    wanted = [_credit(cfg, list(range(7)), alone) for cfg in configs]
    for rank, of_rank in enumerate(run_ranks(3, credit_on_rank, configs)):
        for name, here, there in zip(SETTINGS, of_rank, wanted, strict=True):
            assert here.columns.keys() == there.columns.keys() >= {"advantages", "loss_weights"}
            for column, values in there.columns.items():
                own = step_batch().with_(own=values).select(_numbers(rank)).columns["own"]
                assert torch.allclose(here.columns[column], own, rtol=1e-5, atol=1e-7), (name, rank, column)
            assert here.report.kept.tolist() == there.report.kept[_numbers(rank)].tolist()
            assert here.report.metrics == pytest.approx(there.report.metrics)
            assert here.report.value_metrics == pytest.approx(there.report.value_metrics)
            assert here.mismatch == pytest.approx(there.mismatch)
            assert torch.equal(here.kl, there.kl[_numbers(rank)])


def test_what_leaves_the_update_has_no_weight_and_the_critic_learns_of_every_token(tmp_path: Path) -> None:
    outcome = _credit(load(tmp_path, *SETTINGS["ppo"]), list(range(7)), alone)
    report, columns = outcome.report, outcome.columns
    left_out = (step_batch().segments == 2) | (step_batch().segments == 4)
    assert report.kept.tolist() == [True, True, False, True, False, True, True]
    assert bool((columns["loss_weights"][left_out] == 0).all())
    assert torch.equal(columns["critic_weights"] > 0, step_batch().loss_mask)
    assert float(columns["loss_weights"].sum()) == pytest.approx(3.0), "each mini-batch's weights add up to 1"
    assert float(columns["critic_weights"].sum()) == pytest.approx(4.0)
