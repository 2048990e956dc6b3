"""Supervised fine-tuning, top to bottom: batches of packed sequences, loss on response tokens, one update a step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.cluster import stop
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan, collect_column, select_micro_batches
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import SftSample, SftSet, load_sft
from megatron_rl.data.stream import open_stream, steps_per_epoch
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.trainers import report
from megatron_rl.trainers.placement import plan_for, start_workers
from megatron_rl.types import TrainBatch
from megatron_rl.workers.objectives import NllObjective
from megatron_rl.workers.records import Read
from megatron_rl.workers.train import TrainWorker

_EMA = 0.9


class SftTrainer:
    """The run's state: data and workers."""

    def __init__(self, cfg: RunConfig) -> None:
        """Loads the data before any worker starts, so that bad input costs seconds."""
        self.cfg = cfg
        self.renderer = Renderer.from_config(cfg.model, cfg.data)
        # An evaluation has no training files.
        self.train_set = load_sft(cfg.data, cfg.data.train_files, self.renderer) if cfg.data.train_files else None
        self.val_set = (
            load_sft(cfg.data, cfg.data.val_files, self.renderer, validation=True) if cfg.data.val_files else None
        )
        samples = self.train_set.samples if self.train_set else ()
        sources = [sample.data_source for sample in samples]
        self.stream = open_stream(cfg.data, sources, cfg.trainer.seed) if samples else None
        self.steps_per_epoch = steps_per_epoch(len(samples), cfg.data.train_batch_size)
        self.total_steps = cfg.trainer.total_training_steps or self.steps_per_epoch * cfg.trainer.total_epochs
        self.loss_ema: float | None = None
        self.guard = NonFiniteGuard(cfg.trainer)
        self.workers = start_workers(cfg, self.total_steps, with_engine=False)

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step over train_batch_size sequences."""
        assert self.train_set is not None and self.stream is not None, "an evaluation takes no steps"
        start = time.perf_counter()
        samples = [self.train_set.samples[i] for i in self.stream.next()]
        batch = to_batch(samples)
        segments = batch.segments
        weights = loss_weights(
            self.cfg.actor.loss_agg_mode,
            batch.loss_mask,
            segments,
            batch.num_sequences,
            self.cfg.data.max_response_length,
        )
        (mini,) = self._plan(batch).minis
        stop.commit()
        micros = select_micro_batches(batch.with_(loss_weights=weights), mini)
        results = self.workers.train.each_dp(TrainWorker.step, micros, "actor", NllObjective())
        self.guard.step = step
        self.guard.look(results[0].report, "actor", 1, mini, [sample.where for sample in samples])
        metrics = report.update_metrics([results[0].report])
        loss = metrics.pop("policy/loss", None)
        if loss is not None:
            self.loss_ema = loss if self.loss_ema is None else _EMA * self.loss_ema + (1 - _EMA) * loss
        seconds = time.perf_counter() - start
        metrics |= report.memory_metrics([result.memory_bytes for result in results])
        metrics |= self.guard.metrics({"policy": [results[0].report]})
        metrics |= {} if self.loss_ema is None else {"sft/loss_ema": self.loss_ema}
        metrics |= {
            "time/step": seconds,
            "perf/tokens_per_s": batch.num_tokens / seconds,
        }
        return metrics

    def finished(self) -> bool:
        """Whether the running mean of the loss is below trainer.target_loss."""
        target = self.cfg.trainer.target_loss
        return target is not None and self.loss_ema is not None and self.loss_ema < target

    def validate(self, step: int) -> dict[str, float]:
        """Each validation row once: mean token loss; share of tokens, and of whole responses, that greedy
        decoding would give.
        """
        if self.val_set is None:
            return {}
        samples, size = self.val_set.samples, self.cfg.data.val_batch_size or self.cfg.data.train_batch_size
        self.last_validation = [
            row for at in range(0, len(samples), size) for row in self._score(samples[at : at + size])
        ]
        rows = self.last_validation
        tokens = sum(row["num_tokens"] for row in rows)
        return {
            "val/loss": math.fsum(row["loss"] for row in rows) / tokens,
            "val/token_accuracy": sum(row["num_hits"] for row in rows) / tokens,
            "val/accuracy": sum(row["num_hits"] == row["num_tokens"] for row in rows) / len(rows),
            "val/num_samples": float(len(rows)),
        }

    def _score(self, samples: Sequence[SftSample]) -> list[dict[str, Any]]:
        """Of each sample the summed loss, the trained tokens, and those that greedy decoding would give."""
        batch = to_batch(samples)
        ranks = self._plan(batch).passes()
        micros = select_micro_batches(batch, ranks)
        read = Read(("logprobs", "greedy"))
        found = self.workers.train.each_dp(TrainWorker.forward, micros, "actor", read)
        columns = {"num_tokens": batch.loss_mask} | {
            name: collect_column(batch, ranks, [[part[name] for part in rank] for rank in found])
            for name in ("logprobs", "greedy")
        }
        segments, zeros = batch.segments, torch.zeros(len(samples), dtype=torch.float64)
        sums = {name: zeros.index_add(0, segments, column.double()).tolist() for name, column in columns.items()}
        return [
            {
                "row": sample.index,
                "data_source": sample.data_source,
                "loss": -sums["logprobs"][i],
                "num_tokens": int(sums["num_tokens"][i]),
                "num_hits": int(sums["greedy"][i]),
            }
            for i, sample in enumerate(samples)
        ]

    def validation_rows(self) -> list[dict[str, Any]]:
        """Each row of the last validation: its summed loss, trained tokens, and those that greedy decoding gives."""
        return self.last_validation

    def _plan(self, batch: TrainBatch) -> BatchPlan:
        return plan_for(self.cfg, batch.seq_lens, [0] * batch.num_sequences)

    def sample_rollouts(self, count: int) -> list[dict[str, Any]]:
        """None: nothing is sampled."""
        return []

    def save(self, path: str) -> None:
        """The model in Hugging Face form."""
        self.workers.train.rank0(TrainWorker.save, "actor", path)

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    def data_summary(self) -> dict[str, SftSet]:
        """What was read, for the run's first lines."""
        sets = {"train": self.train_set, "val": self.val_set}
        return {name: samples for name, samples in sets.items() if samples is not None}


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
