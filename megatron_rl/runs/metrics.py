"""Metrics of a step, from the values of its flow. Reads only; sums and counts are divided once, here.

Each function names the values that it reads as its parameters; `readers` lists those of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from megatron_rl.algos.groups import flat_groups
from megatron_rl.algos.preference.base import Answers
from megatron_rl.algos.preference.metrics import figure_means, row_figures
from megatron_rl.data.preferences import PreferenceRow
from megatron_rl.flow import Node, node
from megatron_rl.flow.run import Timings
from megatron_rl.learning.batch import Batch
from megatron_rl.learning.nonfinite import NonFiniteGuard
from megatron_rl.learning.preferences import LoadedRows
from megatron_rl.rewards.base import RewardResult
from megatron_rl.runs.validation import SampleRow, sample_row
from megatron_rl.trainers.parts import Parts
from megatron_rl.types import Metric, OffloadReport, Rollouts, StepReport, SyncReport
from megatron_rl.workers.records import UpdateResult

Metrics: TypeAlias = dict[str, float]

_POLICY_NAMES = {
    "clip_frac": "policy/clip_frac",
    "dual_clip_frac": "policy/dual_clip_frac",
    "ratio": "policy/ratio_mean",
    "entropy": "policy/entropy",
    "approx_kl": "policy/approx_kl",
    "kl_ref": "kl/ref",
    "nll": "sft/loss",
    **{
        f"router_{name}": f"policy/router_{name}"
        for name in ("load_max", "load_mean", "entropy", "balance", "changed", "unknown")
    },
    "vf_loss": "critic/value_loss",
    "vf_error": "critic/value_error",
    "value": "critic/new_value_mean",
    "vf_clip_frac": "critic/clip_frac",
}


@dataclass(frozen=True)
class StepSummary:
    """Of one step."""

    num_tokens: int
    samples: list[SampleRow]


def step_metrics(
    rollouts: Rollouts,
    results: list[RewardResult],
    updates: list[UpdateResult],
    mismatch: dict[str, float],
    sync: SyncReport,
) -> Metrics:
    """What is measured of every step that samples, whatever the algorithm."""
    metrics = reward_metrics(results)
    metrics |= length_metrics(rollouts)
    metrics |= update_metrics([update.report for update in updates])
    metrics |= sum((update.offload for update in updates), OffloadReport()).metrics()
    metrics |= memory_metrics([update.memory_bytes for update in updates]) | speed_metrics(updates)
    # An update that measures the KL itself is asked first.
    return mismatch | metrics | sync.metrics()


def time_metrics(timings: Timings, num_tokens: int, busy_s: float) -> Metrics:
    """timings: node -> (start, end). busy_s: seconds of the slowest policy rank inside its methods."""
    metrics = {f"time/{name}": end - start for name, (start, end) in timings.items()}
    wall = wall_seconds(timings)
    metrics |= {"time/step": wall, "perf/tokens_per_s": num_tokens / wall}
    passes = ("old_logprobs", "ref_logprobs", "both_heads", "values")
    metrics["perf/controller_s"] = wall - busy_s - _alone(timings, "reward", passes)
    return metrics


def wall_seconds(timings: Timings) -> float:
    """From the first node's start to the last one's end."""
    return max(end for _, end in timings.values()) - min(start for start, _ in timings.values())


def memory_metrics(peaks: Sequence[int]) -> dict[str, float]:
    """memory/peak_gib: the most that a rank has held since it started, of the device (or of the process on a CPU)."""
    return {"memory/peak_gib": max(peaks) / 2**30} if peaks else {}


def speed_metrics(updates: Sequence[UpdateResult]) -> Metrics:
    """perf/update_tflops: model FLOP a second of a rank in its updates, in 1e12. perf/mfu: their share of the device's
    peak, where that is known.
    """
    speeds = [update.speed for update in updates if update.speed is not None]
    seconds = sum(speed.seconds for speed in speeds)
    if not seconds:
        return {}
    rate = sum(speed.flops for speed in speeds) / seconds
    peak = speeds[0].peak
    return {"perf/update_tflops": rate / 1e12} | ({} if peak is None else {"perf/mfu": rate / peak})


def group_metrics(results: list[RewardResult], batch: Batch, rollouts: Rollouts) -> Metrics:
    """Groups whose samples all score the same."""
    scores = torch.tensor([result.value for result in results], dtype=torch.float64)
    return {"groups/flat": float(flat_groups(scores, batch.group_ids).sum()) / rollouts.n}


def sampling_metrics(sampling: dict[str, float] | None = None) -> Metrics:
    """What dynamic sampling drew."""
    return sampling or {}


def count_metrics(counts: dict[str, float]) -> Metrics:
    """What the update left out, and why."""
    return counts


def critic_metrics(value_metrics: dict[str, float], critic_updates: list[UpdateResult] | None = None) -> Metrics:
    """How well the values foresaw the returns, and the updates of a critic that is a model of its own."""
    metrics = dict(value_metrics)
    if critic_updates is not None:
        own = update_metrics([update.report for update in critic_updates])
        metrics |= {name.replace("policy/", "critic/"): value for name, value in own.items()}
        offload = sum((update.offload for update in critic_updates), OffloadReport()).metrics()
        metrics |= {f"critic/{name}": value for name, value in offload.items()}
    return metrics


def skip_metrics(guard: NonFiniteGuard, updates: list[UpdateResult]) -> Metrics:
    """Optimizer steps that were passed over because numbers were not finite."""
    return guard.metrics({"policy": [update.report for update in updates]})


def critic_skip_metrics(
    guard: NonFiniteGuard, updates: list[UpdateResult], critic_updates: list[UpdateResult] | None = None
) -> Metrics:
    """The same of actor and critic."""
    models = {"policy": updates} | ({} if critic_updates is None else {"critic": critic_updates})
    return guard.metrics({model: [update.report for update in of_model] for model, of_model in models.items()})


def sft_metrics(parts: Parts, updates: list[UpdateResult]) -> Metrics:
    """The one optimizer step of supervised fine-tuning; updates: a result of each data-parallel rank."""
    metrics = update_metrics([updates[0].report])
    metrics.pop("policy/loss", None)
    metrics |= memory_metrics([result.memory_bytes for result in updates]) | speed_metrics(updates)
    metrics |= parts.models.guard.metrics({"policy": [updates[0].report]})
    average = parts.loss_average.value
    return metrics if average is None else metrics | {"sft/loss_ema": average}


def preference_metrics(
    parts: Parts, samples: list[PreferenceRow], updates: list[UpdateResult], answers: Answers
) -> Metrics:
    """The one optimizer step of a run on preferences, and how the policy before it stood to the rows."""
    metrics = update_metrics([update.report for update in updates])
    metrics |= memory_metrics([result.memory_bytes for result in updates]) | speed_metrics(updates)
    metrics |= parts.models.guard.metrics({"policy": [update.report for update in updates]})
    loss = parts.cfg.judged_loss
    figures = row_figures(loss, answers)
    means = figure_means(figures, [row.data_source for row in samples])
    whole = metrics.pop("policy/loss", means["loss"])
    if loss.adds_nll:
        means["nll"] = whole - means["loss"]
    if loss.mismatched:
        means["kl"] = answers.kl
    return metrics | {f"preference/{name}": value for name, value in (means | {"loss": whole}).items()}


def preference_summary(loaded: LoadedRows) -> StepSummary:
    """Of a step on preferences."""
    return StepSummary(loaded.batch.num_tokens, [])


def rollouts_summary(count: int, rollouts: Rollouts, results: list[RewardResult]) -> StepSummary:
    """With the first sample of `count` evenly spread prompts."""
    groups = rollouts.num_groups
    picked = [i * groups // count for i in range(min(count, groups))]
    samples = [sample_row(rollouts, i * rollouts.n, results[i * rollouts.n]) for i in picked]
    return StepSummary(int(rollouts.seq_lens.sum()), samples)


def batch_summary(batch: Batch) -> StepSummary:
    """Of a step without rollouts."""
    return StepSummary(batch.num_tokens, [])


def readers(parts: Parts) -> list[Node]:
    """What reads the values of a step: its metrics and its summary. Checked against the flow when built."""
    needs, guard = parts.cfg.needs, parts.models.guard
    if needs.preferences:
        return [node(preference_summary), node(preference_metrics, parts)]
    if not needs.rollouts:
        return [node(batch_summary), node(sft_metrics, parts)]
    shared = [node(rollouts_summary, parts.cfg.trainer.num_logged_rollouts), node(step_metrics)]
    if needs.critic:
        return [*shared, node(count_metrics), node(critic_metrics), node(critic_skip_metrics, guard)]
    return [
        *shared,
        node(group_metrics),
        node(sampling_metrics),
        node(count_metrics),
        node(skip_metrics, guard),
    ]


def _alone(timings: Timings, node: str, others: Sequence[str]) -> float:
    """Seconds of `node` after the last of `others` ended: its part of the step's critical path; 0 where it is no node
    of its own.
    """
    if node not in timings:
        return 0.0
    start, end = timings[node]
    return max(0.0, end - max([start, *(timings[other][1] for other in others if other in timings)]))


def reward_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Mean, spread and extremes of the scores; failures counted; extra fields averaged over the samples that have
    them, as reward/<name>; one that is called as a metric above is reward/extra_<name>.
    """
    scores = torch.tensor([result.value for result in results], dtype=torch.float64)
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/failed": float(sum(result.failed is not None for result in results)),
    }
    extras: dict[str, Metric] = {}
    for result in results:
        for name, value in result.extra.items():
            extras[name] = extras.get(name, Metric(0.0, 0.0)) + Metric(value, 1.0)
    taken = {name.removeprefix("reward/") for name in metrics}
    named = {f"extra_{name}" if name in taken else name: extra for name, extra in sorted(extras.items())}
    return metrics | {f"reward/{name}": extra.mean for name, extra in named.items()}


def length_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Lengths in tokens, and the share of responses that hit the length limit."""
    return {
        "length/prompt_mean": float(rollouts.prompt_lens.mean()),
        "length/response_mean": float(rollouts.lens.mean()),
        "length/response_max": float(rollouts.lens.max()),
        "length/cut_share": float(rollouts.was_cut.mean()),
    }


def update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the optimizer steps of one training step; token metrics are weighted by their tokens. Steps that were
    not made, because numbers were not finite, count for nothing here.
    """
    reports = [report for report in reports if report.updated]
    metrics = {"policy/updates": float(len(reports))}
    if not reports:
        return metrics
    total: dict[str, Metric] = {}
    for report in reports:
        for name, metric in report.metrics.items():
            total[name] = metric + total.get(name, Metric(0.0, 0.0))
    metrics |= {
        "policy/loss": sum(report.loss for report in reports) / len(reports),
        "policy/grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "policy/lr": reports[-1].lr,
    }
    return metrics | {_POLICY_NAMES[name]: metric.mean for name, metric in total.items()}
