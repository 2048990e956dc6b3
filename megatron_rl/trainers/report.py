"""Metrics of a step, from the values of its flow. Reads only; sums and counts are divided once, here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rl.algos.correction import mismatch_metrics
from megatron_rl.algos.groups import flat_groups
from megatron_rl.algos.values import explained_variance
from megatron_rl.rewards.base import RewardResult
from megatron_rl.types import Metric, OffloadReport, RolloutGroup, StepReport

_POLICY_NAMES = {
    "clip_frac": "policy/clip_frac",
    "dual_clip_frac": "policy/dual_clip_frac",
    "ratio": "policy/ratio_mean",
    "entropy": "policy/entropy",
    "approx_kl": "policy/approx_kl",
    "kl_ref": "kl/ref",
    "nll": "sft/loss",
    "vf_loss": "critic/value_loss",
    "vf_error": "critic/value_error",
    "value": "critic/new_value_mean",
    "vf_clip_frac": "critic/clip_frac",
}


def step_metrics(
    values: Mapping[str, Any], timings: Mapping[str, tuple[float, float]], busy_s: float, on_policy: bool
) -> dict[str, float]:
    """What is measured of every step that samples, whatever the algorithm.

    values: the flow's outputs. timings: node -> (start, end). busy_s: seconds of the slowest policy rank
    inside its methods.
    """
    groups: list[RolloutGroup] = values["groups"]
    batch = values["batch"]
    metrics = reward_metrics(values["results"])
    metrics |= length_metrics(groups)
    metrics |= update_metrics([update.report for update in values["updates"]])
    metrics |= sum((update.offload for update in values["updates"]), OffloadReport()).metrics()
    metrics |= memory_metrics([update.memory_bytes for update in values["updates"]])
    trainer_logprobs = values["train_logprobs"] if on_policy else values["old_logprobs"]
    # All sequences: those that the update left out were looked at by a pass of their own.
    seen = batch.loss_mask
    metrics |= mismatch_metrics(trainer_logprobs[seen], batch.columns["rollout_logprobs"][seen])
    if "ref_logprobs" in values and "kl/ref" not in metrics:
        gap = trainer_logprobs[seen] - values["ref_logprobs"][seen]
        metrics["kl/ref"] = float(gap.mean())
    metrics |= values["sync"].metrics()
    metrics |= {f"time/{name}": end - start for name, (start, end) in timings.items()}
    wall = max(end for _, end in timings.values()) - min(start for start, _ in timings.values())
    metrics |= {"time/step": wall, "perf/tokens_per_s": batch.num_tokens / wall}
    passes = ("old_logprobs", "ref_logprobs", "both_heads", "values")
    metrics["perf/controller_s"] = wall - busy_s - _alone(timings, "reward", passes)
    return metrics


def memory_metrics(peaks: Sequence[int]) -> dict[str, float]:
    """memory/peak_gib: the most that a rank has held since it started, of the device (or of the process on a CPU)."""
    return {"memory/peak_gib": max(peaks) / 2**30} if peaks else {}


def group_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Groups whose samples all score the same."""
    scores = torch.tensor([result.value for result in values["results"]], dtype=torch.float64)
    flat, size = flat_groups(scores, values["group_ids"]), len(values["groups"][0].rollouts)
    return {"groups/flat": float(flat.sum()) / size}


def critic_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """The critic's updates of one step, and how well its values foresaw the returns.

    values: the flow's outputs; critic_updates where the critic is a model of its own.
    """
    mask, returns = values["batch"].loss_mask, values["returns"]
    seen = values["seen_values"]
    metrics = {
        "critic/value_mean": float(seen[mask].double().mean()),
        "critic/return_mean": float(returns[mask].double().mean()),
        "critic/explained_variance": explained_variance(seen, returns, mask),
    }
    if "critic_updates" in values:
        found = update_metrics([update.report for update in values["critic_updates"]])
        metrics |= {name.replace("policy/", "critic/"): value for name, value in found.items()}
        offload = sum((update.offload for update in values["critic_updates"]), OffloadReport()).metrics()
        metrics |= {f"critic/{name}": value for name, value in offload.items()}
    return metrics


def _alone(timings: Mapping[str, tuple[float, float]], node: str, others: Sequence[str]) -> float:
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
