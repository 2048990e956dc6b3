"""Metrics of a step, from the values of its flow. Reads only; sums and counts are divided once, here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rl.algos.advantages import flat_groups
from megatron_rl.algos.correction import mismatch_metrics
from megatron_rl.rewards.base import RewardResult
from megatron_rl.types import Metric, OffloadReport, RolloutGroup, StepReport

_POLICY_NAMES = {
    "clip_frac": "policy/clip_frac",
    "ratio": "policy/ratio_mean",
    "entropy": "policy/entropy",
    "approx_kl": "policy/approx_kl",
    "kl_ref": "kl/ref",
    "nll": "sft/loss",
}


def grpo_metrics(
    values: Mapping[str, Any], timings: Mapping[str, tuple[float, float]], busy_s: float, on_policy: bool
) -> dict[str, float]:
    """All metrics of one GRPO step.

    values: the flow's outputs. timings: node -> (start, end). busy_s: seconds of the slowest policy rank inside its
    methods.
    """
    groups: list[RolloutGroup] = values["groups"]
    batch, kept = values["batch"], values["kept"]
    scores = torch.tensor([result.value for result in values["results"]], dtype=torch.float64)
    flat = flat_groups(scores, values["group_ids"])
    metrics = reward_metrics(values["results"])
    metrics |= length_metrics(groups)
    metrics |= {
        "groups/flat": float(flat.sum()) / len(groups[0].rollouts),
        "groups/dropped": float((~kept).sum()) / len(groups[0].rollouts),
    }
    metrics |= update_metrics([update.report for update in values["updates"]])
    metrics |= sum((update.offload for update in values["updates"]), OffloadReport()).metrics()
    trainer_logprobs = values["train_logprobs"] if on_policy else values["old_logprobs"]
    seen = batch.loss_mask & kept[batch.segment_ids()] if on_policy else batch.loss_mask
    metrics |= mismatch_metrics(trainer_logprobs[seen], batch.columns["rollout_logprobs"][seen])
    if "ref_logprobs" in values and "kl/ref" not in metrics:
        gap = trainer_logprobs[seen] - values["ref_logprobs"][seen]
        metrics["kl/ref"] = float(gap.mean())
    metrics["sync/bytes"] = float(values["sync_bytes"])
    metrics |= {f"time/{name}": end - start for name, (start, end) in timings.items()}
    wall = max(end for _, end in timings.values()) - min(start for start, _ in timings.values())
    metrics |= {"time/step": wall, "perf/tokens_per_s": batch.num_tokens / wall}
    metrics["perf/controller_s"] = wall - busy_s - _alone(timings, "reward", ("old_logprobs", "ref_logprobs"))
    return metrics


def _alone(timings: Mapping[str, tuple[float, float]], node: str, others: Sequence[str]) -> float:
    """Seconds of `node` after the last of `others` ended: its part of the step's critical path."""
    start, end = timings[node]
    return max(0.0, end - max([start, *(timings[other][1] for other in others if other in timings)]))


def reward_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Mean, spread and extremes of the scores; failures counted; extra fields averaged over the samples that have
    them.
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
    return metrics | {f"reward/extra/{name}": extra.mean for name, extra in sorted(extras.items())}


def length_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Lengths in tokens, and the share of responses that hit the length limit."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return {
        "length/prompt_mean": sum(len(group.prompt.token_ids) for group in groups) / len(groups),
        "length/response_mean": sum(lengths) / len(lengths),
        "length/response_max": float(max(lengths)),
        "length/cut_share": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }


def update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the optimizer steps of one training step; token metrics are weighted by their tokens."""
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


def validation_metrics(groups: Sequence[RolloutGroup], results: Sequence[RewardResult]) -> dict[str, float]:
    """val/accuracy: mean score over all samples; the same by data source where there are several."""
    scores: dict[str, Metric] = {}
    at = 0
    for group in groups:
        values = [result.value for result in results[at : at + len(group.rollouts)]]
        at += len(values)
        source = group.prompt.data_source
        scores[source] = scores.get(source, Metric(0.0, 0.0)) + Metric(sum(values), float(len(values)))
    total = Metric(sum(m.total for m in scores.values()), sum(m.count for m in scores.values()))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {
        "val/accuracy": total.mean,
        "val/num_samples": total.count,
        "val/failed": float(sum(result.failed is not None for result in results)),
        "val/response_length": sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts),
    }
    if len(scores) > 1:
        metrics |= {f"val/accuracy/{source}": metric.mean for source, metric in sorted(scores.items())}
    return metrics
