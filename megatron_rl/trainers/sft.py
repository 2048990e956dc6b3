"""Supervised fine-tuning, top to bottom: batches of packed sequences, loss on response tokens, one update a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.cluster import stop
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan, select_micro_batches
from megatron_rl.data.sft import SftSample
from megatron_rl.flow import Flow, node
from megatron_rl.learning.loss_average import LossAverage
from megatron_rl.learning.passes import Models, forward, plan_for
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import TrainBatch
from megatron_rl.workers.objectives import NllObjective
from megatron_rl.workers.records import Read, UpdateResult
from megatron_rl.workers.train import TrainWorker


def sft(parts: Parts) -> Flow:
    """The flow of one step."""
    nodes = [
        node(assemble, parts.cfg),
        node(update, parts.models, gives="updates", group="policy"),
        node(watch_loss, parts.loss_average),
    ]
    return Flow(nodes, sources={"samples": list[SftSample]})


@dataclass(frozen=True)
class SftBatch:
    """The samples of a step, end to end, and where each goes."""

    batch: TrainBatch
    """with loss_weights"""
    plan: BatchPlan


def assemble(cfg: RunConfig, samples: list[SftSample]) -> SftBatch:
    """Pack the samples, plan micro-batches, and weigh each token in the loss."""
    batch = to_batch(samples)
    weights = loss_weights(
        cfg.actor.loss_agg_mode,
        batch.loss_mask,
        batch.segments,
        batch.num_sequences,
        cfg.data.max_response_length,
    )
    return SftBatch(batch.with_(loss_weights=weights), _plan(cfg, batch))


def update(models: Models, batch: TrainBatch, plan: BatchPlan, samples: list[SftSample]) -> list[UpdateResult]:
    """One optimizer step on the negative log-likelihood; a result of each data-parallel rank."""
    (mini,) = plan.minis
    stop.commit()
    micros = select_micro_batches(batch, mini)
    results = models.group.each_dp(TrainWorker.step, micros, "actor", NllObjective())
    models.guard.look(results[0].report, "actor", 1, mini, [sample.where for sample in samples])
    return results


def watch_loss(average: LossAverage, updates: list[UpdateResult]) -> None:
    """The running mean, by which trainer.target_loss ends the run."""
    report = updates[0].report
    if report.updated:
        average.observe(report.loss)


def score_rows(models: Models, samples: Sequence[SftSample]) -> list[dict[str, float]]:
    """Of each sample the summed loss, the trained tokens, and those that greedy decoding would give."""
    batch = to_batch(samples)
    columns = forward(models, batch, _plan(models.cfg, batch), "actor", Read(("logprobs", "greedy")))
    zeros = torch.zeros(len(samples), dtype=torch.float64)
    sums = {
        name: zeros.index_add(0, batch.segments, column.double()).tolist()
        for name, column in {"num_tokens": batch.loss_mask, **columns}.items()
    }
    return [
        {"loss": -sums["logprobs"][i], "num_tokens": int(sums["num_tokens"][i]), "num_hits": int(sums["greedy"][i])}
        for i in range(len(samples))
    ]


def to_batch(samples: Sequence[SftSample]) -> TrainBatch:
    """Samples end to end. The first token of each is never trained on: nothing predicts it."""
    mask: list[bool] = []
    for sample in samples:
        mask.extend((False, *sample.loss_mask[1:]))
    return TrainBatch(
        tokens=torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.int64),
        seq_lens=tuple(len(sample.token_ids) for sample in samples),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
    )


def _plan(cfg: RunConfig, batch: TrainBatch) -> BatchPlan:
    return plan_for(cfg, batch.seq_lens, [0] * batch.num_sequences)
