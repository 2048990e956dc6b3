"""Checks of checkpoints and of resuming from them, and the names of a checkpoint's files."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.config.metrics import Mode, better_mode, is_measured, validation_metrics
from megatron_rl.config.run import RunConfig
from megatron_rl.config.text.schema import schema_of
from megatron_rl.errors import Fault

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, inside the run's."""
CHECKPOINT = re.compile(r"step_(\d{6,})")
STATE_FILE, MANIFEST_FILE = "state.json", "manifest.json"
MODE_KEY = "trainer.resume_mode"


def is_checkpoint(path: Path) -> bool:
    """Whether the folder holds the files that every checkpoint has."""
    return (path / STATE_FILE).is_file() and (path / MANIFEST_FILE).is_file()


def resume_path(cfg: RunConfig) -> list[Fault]:
    """A path to go on from is a checkpoint, or a run with checkpoints."""
    mode = cfg.trainer.resume_mode
    if mode in ("auto", "disable"):
        return []
    path, cure = Path(mode), "give auto, disable, a checkpoint (RUN/checkpoints/step_...) or the folder of a run"
    if not path.is_dir():
        return [Fault(MODE_KEY, mode, "there is no such folder", cure)]
    if is_checkpoint(path):
        return []
    folder = path / CHECKPOINTS
    if folder.is_dir() and any(CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir()):
        return []
    what = "is neither a checkpoint of megatron_rl nor a run with checkpoints"
    return [Fault(MODE_KEY, mode, what, cure)]


def resume_changes(cfg: RunConfig) -> list[Fault]:
    """Keys that may differ from the checkpoint's exist."""
    schema = schema_of(RunConfig)
    faults: list[Fault] = []
    for name in cfg.trainer.resume_changes:
        if schema.key_of(name) is None and name not in schema.short:
            near = schema.suggest(name)
            cure = f"did you mean {' or '.join(near)}?" if near else "see `megatron-rl keys`"
            faults.append(Fault("trainer.resume_changes", name, "is no key", cure))
    return faults


def best_metric(cfg: RunConfig) -> list[Fault]:
    """The metric that chooses the best checkpoint is measured, and checkpoints are written."""
    metric, mode, key = cfg.checkpoint.keep_best, cfg.checkpoint.best_mode, "checkpoint.keep_best"
    if metric is None:
        reason, cure = "checkpoint.keep_best is unset: no checkpoint is the best one", "set that, or leave this out"
        return [] if mode is None else [Fault("checkpoint.best_mode", mode, reason, cure)]
    faults = _metric_faults(cfg, key, metric, "checkpoint.best_mode", mode)
    if cfg.checkpoint.freq == 0:
        faults.append(Fault(key, metric, "checkpoint.freq is 0: no checkpoint is written", "leave one of them out"))
    return faults


def early_stop(cfg: RunConfig) -> list[Fault]:
    """The metric that ends the run is measured in validation."""
    stop, key = cfg.trainer.early_stop, "trainer.early_stop.metric"
    if stop.metric is None:
        return []
    if not stop.metric.startswith("val/"):
        reason = "is no metric of validation"
        return [Fault(key, stop.metric, reason, f"use one of {', '.join(validation_metrics(cfg))}")]
    return _metric_faults(cfg, key, stop.metric, "trainer.early_stop.mode", stop.mode)


def _metric_faults(cfg: RunConfig, key: str, metric: str, mode_key: str, mode: Mode | None) -> list[Fault]:
    faults: list[Fault] = []
    if metric.startswith("val/") and not cfg.validates:
        reason = "is a metric of validation, and this run does not validate"
        faults.append(Fault(key, metric, reason, "give data.val_files and trainer.test_freq, or another metric"))
    elif metric.startswith("val/") and not is_measured(cfg, metric):
        names = ", ".join(validation_metrics(cfg))
        faults.append(Fault(key, metric, "is no metric of this run's validation", f"use one of {names}"))
    elif better_mode(metric, mode) is None:
        reason = f"whether more or less of {metric} is better is not said by its name"
        faults.append(Fault(mode_key, mode, reason, "write max or min"))
    return faults


def restarts(cfg: RunConfig) -> list[Fault]:
    """What a restart builds again are processes of the workers' own."""
    if cfg.trainer.max_restarts == 0 or cfg.cluster.backend == "ray":
        return []
    reason = "has no effect with cluster.backend=inline: the worker is in the process that would start it again"
    return [Fault("trainer.max_restarts", cfg.trainer.max_restarts, reason, "set it to 0, or cluster.backend=ray")]
