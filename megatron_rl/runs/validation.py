"""Validation: each row scored once; accuracy, and with several samples a prompt avg@k, pass@k, maj@k, by source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megatron_rl.algos.preference.metrics import figure_means, row_figures
from megatron_rl.data.preferences import PreferenceRow
from megatron_rl.data.sft import SftSample
from megatron_rl.rewards.answers import extract_answer, vote
from megatron_rl.rewards.base import RewardResult
from megatron_rl.trainers.dpo import score_rows as score_preferences
from megatron_rl.trainers.parts import Parts
from megatron_rl.trainers.reward_model import score_rows as score_answers
from megatron_rl.trainers.sft import score_rows
from megatron_rl.types import FINISH_REASONS, Prompt, Rollouts

SampleRow: TypeAlias = dict[str, object]
"""One sample as rollouts.jsonl and an evaluation's answers.jsonl hold it."""


@dataclass(frozen=True)
class Validation:
    """Metrics, and what was seen, a row a sample."""

    metrics: dict[str, float]
    rows: Callable[[], list[SampleRow]]


def validate(parts: Parts, step: int) -> Validation:
    """Score the validation set. Metrics are empty if there is none."""
    if parts.cfg.needs.rollouts:
        val = parts.prompts.val
        return Validation({}, list) if val is None else validate_prompts(parts, val.items, step)
    if parts.cfg.needs.preferences:
        val = parts.preferences.val
        return Validation({}, list) if val is None else validate_preferences(parts, val.items)
    val, prompts = parts.samples.val, parts.prompts.val
    rows = Validation({}, list) if val is None else validate_samples(parts, val.items)
    if prompts is None:
        return rows
    sampled = validate_sampled(parts, prompts.items, step)
    return Validation(rows.metrics | sampled.metrics, lambda: [*rows.rows(), *sampled.rows()])


def validate_prompts(parts: Parts, prompts: Sequence[Prompt], step: int) -> Validation:
    """Every row sampled val.n times and scored once each (contract R4)."""
    val, sampler = parts.cfg.rollout.val, parts.sampler
    size = parts.cfg.data.val_batch_size or len(prompts)
    sampling = sampler.sampling(val.n, val.temperature, val.top_p, val.top_k)
    batches = [
        sampler.sample(prompts[first : first + size], sampling, f"val/{step}", first)
        for first in range(0, len(prompts), size)
    ]
    rollouts = Rollouts.concat(batches)
    results = parts.rewards.score(rollouts)

    def rows() -> list[SampleRow]:
        return [
            {"row": rollouts.prompts[s // rollouts.n].index, **sample_row(rollouts, s, result)}
            for s, result in enumerate(results)
        ]

    return Validation(validation_metrics(rollouts, results, val.pass_score), rows)


_OF_SAMPLED = {"val/accuracy": "val/reward", "val/num_rows": "val/num_prompts", "val/num_samples": "val/num_responses"}
"""Metrics of prompts -> their names beside those of SFT's rows, which have the first."""


def validate_sampled(parts: Parts, prompts: Sequence[Prompt], step: int) -> Validation:
    """As validate_prompts, by an engine that gets the newest weights for it; metrics are named by _OF_SAMPLED."""
    parts.sampler.publish_noticed()
    sampled = validate_prompts(parts, prompts, step)

    def named(metric: str) -> str:
        head, name, *source = metric.split("/", 2)
        return "/".join([_OF_SAMPLED.get(f"{head}/{name}", f"{head}/{name}"), *source])

    return Validation({named(name): value for name, value in sampled.metrics.items()}, sampled.rows)


def validate_samples(parts: Parts, samples: Sequence[SftSample]) -> Validation:
    """Each row once: mean token loss; share of tokens, and of whole responses, that greedy decoding would give."""
    data = parts.cfg.data
    size = data.val_batch_size or data.train_batch_size
    scored = [row for at in range(0, len(samples), size) for row in score_rows(parts.models, samples[at : at + size])]
    tokens = sum(row["num_tokens"] for row in scored)
    metrics = {
        "val/loss": math.fsum(row["loss"] for row in scored) / tokens,
        "val/token_accuracy": sum(row["num_hits"] for row in scored) / tokens,
        "val/accuracy": sum(row["num_hits"] == row["num_tokens"] for row in scored) / len(scored),
        "val/num_samples": float(len(scored)),
    }

    def rows() -> list[SampleRow]:
        return [
            {"row": sample.index, "data_source": sample.data_source, **row}
            for sample, row in zip(samples, scored, strict=True)
        ]

    return Validation(metrics, rows)


def validate_preferences(parts: Parts, rows: Sequence[PreferenceRow]) -> Validation:
    """Each row once: loss, accuracy, margins and rewards, as in training (algos/preference/metrics.py)."""
    data, loss = parts.cfg.data, parts.cfg.judged_loss
    at_once = data.val_batch_size or data.train_batch_size
    if parts.cfg.needs.reward_head:
        answers, nll = score_answers(parts, rows, at_once), 0.0
    else:
        answers, nll = score_preferences(parts, rows, at_once)
    figures = row_figures(loss, answers)
    means = figure_means(figures, [row.data_source for row in rows])
    means["loss"] += nll
    metrics = {f"val/{name}": value for name, value in means.items()} | {"val/num_samples": float(len(rows))}
    metrics |= {"val/nll": nll} if loss.adds_nll else {}
    metrics |= {"val/kl": answers.kl} if loss.mismatched else {}

    def table() -> list[SampleRow]:
        return [
            {"row": row.index, "data_source": row.data_source, **{name: float(of[i]) for name, of in figures.items()}}
            for i, row in enumerate(rows)
        ]

    return Validation(metrics, table)


def sample_row(rollouts: Rollouts, sequence: int, result: RewardResult) -> SampleRow:
    """One sample with its score."""
    prompt = rollouts.prompts[sequence // rollouts.n]
    return {
        "prompt": prompt.text,
        "response": rollouts.fetch_text(sequence),
        "ground_truth": prompt.ground_truth,
        "reward": result.value,
        "failed": result.failed,
        "finish_reason": FINISH_REASONS[rollouts.finish[sequence]],
        "num_tokens": int(rollouts.lens[sequence]),
        "weight_version": int(rollouts.newest_version[sequence]),
        "data_source": prompt.data_source,
    }


def validation_metrics(
    rollouts: Rollouts, results: Sequence[RewardResult], pass_score: float = 1.0
) -> dict[str, float]:
    """Metrics over all rows; those of accuracy by data source too where there are several.

    results: one a sample, group after group. pass_score: a sample passes with at least this score.

        val/accuracy   mean score of all samples
        val/avg@n      the same, where each row has n > 1 samples
        val/pass@k     chance that one of k samples passes, for k = 1, 2, 4 ... and n
        val/maj@n      mean score of the answer that most of the n samples give

    Each row counts once (contract R4): a row that stands twice in them is an error of the caller's.
    """
    rows, n = [prompt.index for prompt in rollouts.prompts], rollouts.n
    assert len(set(rows)) == len(rows), "a validation row was scored twice"
    assert len(results) == rollouts.num_sequences, "not every sample has a result"
    by_source: dict[str, list[dict[str, float]]] = defaultdict(list)
    for group, prompt in enumerate(rollouts.prompts):
        sequences = range(group * n, (group + 1) * n)
        scores = [results[s].value for s in sequences]
        answers = [vote(extract_answer(rollouts.fetch_text(s))) for s in sequences] if n > 1 else []
        by_source[prompt.data_source].append(row_metrics(scores, answers, pass_score))
    metrics = _means([row for of_source in by_source.values() for row in of_source])
    metrics |= {
        "val/num_rows": float(rollouts.num_groups),
        "val/num_samples": float(len(results)),
        "val/failed": float(sum(result.failed is not None for result in results)),
        "val/response_length": float(rollouts.lens.mean()),
    }
    if len(by_source) > 1:
        for source, of_source in sorted(by_source.items()):
            metrics |= {f"{name}/{source}": value for name, value in _means(of_source).items()}
    return metrics


def row_metrics(scores: Sequence[float], answers: Sequence[str], pass_score: float) -> dict[str, float]:
    """One row's part of each mean, from its n samples' scores and answers."""
    n = len(scores)
    metrics = {"val/accuracy": math.fsum(scores) / n}
    if n == 1:
        return metrics
    passed = sum(score >= pass_score for score in scores)
    metrics[f"val/avg@{n}"] = metrics["val/accuracy"]
    metrics |= {f"val/pass@{k}": pass_at_k(n, passed, k) for k in _powers_of_two(n)}
    metrics[f"val/maj@{n}"] = majority_score(scores, answers)
    return metrics


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the `passed`: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), in whole numbers.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def majority_score(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Mean score of the samples that give the most frequent answer.

    Where several answers are equally frequent, the expectation over a fair draw between them. Samples of one
    answer may score differently (a reward that looks at more than the answer): their mean counts.
    """
    by_answer: dict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        by_answer[answer].append(score)
    most = max(len(of_answer) for of_answer in by_answer.values())
    winners = [math.fsum(of_answer) / most for of_answer in by_answer.values() if len(of_answer) == most]
    return math.fsum(winners) / len(winners)


def _powers_of_two(n: int) -> list[int]:
    """1, 2, 4 ... below n, and n."""
    return [*(2**power for power in range(n.bit_length()) if 2**power < n), n]


def _means(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the rows that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}
