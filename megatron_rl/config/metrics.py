"""The metrics of a run's validation, known before it starts, and which of their values are the better ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_rl.config.run import RunConfig

Mode = Literal["max", "min"]
_LARGER = ("accuracy", "token_accuracy", "avg@", "pass@", "maj@", "reward", "margin")
_SMALLER = ("loss", "nll", "error")
_BY_SOURCE = ("accuracy", "avg@", "pass@", "maj@", "reward", "margin", "error")


def validation_metrics(cfg: RunConfig) -> tuple[str, ...]:
    """Names of the metrics of every validation, those of single data sources left out."""
    if cfg.needs.preferences:
        names = list(_of_preferences(cfg))
    elif cfg.needs.rollouts:
        names = ["accuracy", *_of_samples(cfg), "num_rows", "num_samples", "failed", "response_length"]
    else:
        names = ["loss", "token_accuracy", "accuracy", "num_samples"] if cfg.data.val_files else []
        if cfg.samples_prompts:
            names += ["reward", *_of_samples(cfg), "num_prompts", "num_responses", "failed", "response_length"]
    return tuple(f"val/{name}" for name in names)


def is_measured(cfg: RunConfig, metric: str) -> bool:
    """Whether a validation of the run may have the metric. One of a data source is known once rows are read."""
    _, name, *source = metric.split("/", 2)
    has_sources = name.startswith(_BY_SOURCE) and (cfg.needs.rollouts or cfg.needs.preferences or name != "accuracy")
    return f"val/{name}" in validation_metrics(cfg) and (not source or has_sources)


def better_mode(metric: str, mode: Mode | None) -> Mode | None:
    """The mode that the config gives, or what the metric's name says; None if neither does."""
    if mode is not None:
        return mode
    if metric == "reward/mean":
        return "max"
    name = metric.split("/")[1] if metric.startswith("val/") else ""
    if name.startswith(_LARGER):
        return "max"
    return "min" if name.startswith(_SMALLER) else None


def _of_samples(cfg: RunConfig) -> Iterator[str]:
    """What n samples of each prompt have beside their mean."""
    n = cfg.rollout.val.n
    if n > 1:
        yield f"avg@{n}"
        yield from (f"pass@{k}" for k in [*(2**power for power in range(n.bit_length()) if 2**power < n), n])
        yield f"maj@{n}"


def _of_preferences(cfg: RunConfig) -> Iterator[str]:
    """As algos/preference/metrics.py has them."""
    loss = cfg.judged_loss
    yield from ("loss", "num_samples")
    if loss.rows == "scored":
        yield from ("error", "score", "length")
        return
    yield from ("accuracy", "margin")
    yield from (f"{side}_{name}" for side in ("chosen", "rejected") for name in ("reward", loss.value_is, "length"))
    yield from ("nll",) if loss.adds_nll else ()
    yield from ("kl",) if loss.mismatched else ()
