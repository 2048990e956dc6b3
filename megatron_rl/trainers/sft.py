"""Supervised fine-tuning, top to bottom: batches of packed sequences, loss on response tokens, one update a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.cluster import stop
from megatron_rl.data.batching import BatchPlan
from megatron_rl.data.sft import SftSample
from megatron_rl.flow import Flow, node
from megatron_rl.learning.batch import Batch, plan_roles
from megatron_rl.learning.loss_average import LossAverage
from megatron_rl.learning.passes import Assembled, Models
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import Column
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.objectives import NllObjective
from megatron_rl.workers.rank_batch import MaskedSequences
from megatron_rl.workers.records import UpdateResult
from megatron_rl.workers.token_work import MiniBatches
from megatron_rl.workers.train import TrainWorker


def sft(parts: Parts) -> Flow:
    """The flow of one step."""
    nodes = [
        node(assemble, parts.models, group="policy"),
        node(update, parts.models, gives="updates", group="policy"),
        node(watch_loss, parts.loss_average),
        *([node(parts.sampler.notice)] if parts.cfg.samples_prompts else []),
    ]
    return Flow(nodes, sources={"samples": list[SftSample]})


def assemble(models: Models, samples: list[SftSample]) -> Assembled:
    """Give each rank its samples, plan micro-batches, and weigh each token in the loss."""
    batch, plan = _load(models, samples)
    one_mini = MiniBatches(torch.zeros(batch.num_sequences, dtype=torch.int64), 1)
    models.group.each_dp(BatchWorker.weigh, [one_mini.select(numbers) for numbers in batch.numbers])
    return Assembled(batch, plan)


def update(models: Models, batch: Batch, plan: BatchPlan) -> list[UpdateResult]:
    """One optimizer step on the negative log-likelihood; a result of each data-parallel rank."""
    (mini,) = plan.minis
    stop.commit()
    columns: dict[str, Column] = {"loss_weights": "loss_weights"}
    results = models.group.each_dp(TrainWorker.step, mini, "actor", NllObjective(), columns)
    models.guard.look(results[0].report, "actor", 1, mini, batch.names)
    return results


def watch_loss(average: LossAverage, updates: list[UpdateResult]) -> None:
    """The running mean, by which trainer.target_loss ends the run."""
    report = updates[0].report
    if report.updated:
        average.observe(report.loss)


def score_rows(models: Models, samples: Sequence[SftSample]) -> list[dict[str, float]]:
    """Of each sample the summed loss, the trained tokens, and those that greedy decoding would give."""
    batch, plan = _load(models, samples)
    models.forward(plan, "actor", {"logprobs": "train_logprobs", "greedy": "greedy"}, temperature=1.0)
    columns: tuple[Column, ...] = ("train_logprobs", "greedy")
    of_ranks = models.on_each(BatchWorker.sums, columns)
    logprobs, hits = (batch.join([sums[column] for sums in of_ranks]).tolist() for column in columns)
    return [
        {"loss": -logprobs[i], "num_tokens": count, "num_hits": int(hits[i])}
        for i, count in enumerate(batch.response_lens.tolist())
    ]


def _load(models: Models, samples: Sequence[SftSample]) -> tuple[Batch, BatchPlan]:
    """One mini-batch of all samples; each rank has its own."""
    seq_lens = tuple(len(sample.token_ids) for sample in samples)
    role = (models.cfg.actor_training, [0] * len(samples))
    (plan,), numbers = plan_roles(models.cfg, seq_lens, [role])
    # The first token is never trained on: nothing predicts it.
    trained = [sum(sample.loss_mask[1:]) for sample in samples]
    batch = Batch(
        seq_lens,
        response_lens=torch.tensor(trained),
        numbers=numbers,
        group_ids=torch.arange(len(samples)),
        was_cut=torch.zeros(len(samples), dtype=torch.bool),
        names=lambda: [sample.where for sample in samples],
    )
    sources = [
        MaskedSequences(
            of_rank,
            tokens=tuple(np.array(samples[s].token_ids, np.int32) for s in of_rank),
            masks=tuple(np.array(samples[s].loss_mask, np.bool_) for s in of_rank),
        )
        for of_rank in numbers
    ]
    models.group.each_dp(BatchWorker.load, sources)
    return batch, plan
