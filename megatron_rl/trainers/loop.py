"""What every run does around its steps: log, validate, save, draw, close. No algorithm."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.arithmetic import batch_table, format_table, layout_table
from megatron_rl.config.layout import read_model_shape
from megatron_rl.config.load import dump_yaml, to_dict
from megatron_rl.config.run import RunConfig
from megatron_rl.observe.log import set_step, setup_logging
from megatron_rl.observe.progress import Progress
from megatron_rl.observe.report import plot_curves
from megatron_rl.observe.sinks import METRICS_FILE, Sink, open_sinks
from megatron_rl.observe.step_line import step_line

ROLLOUTS_FILE = "rollouts.jsonl"


class Counted(Protocol):
    """A data set that knows what became of its rows."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_filtered(self) -> int: ...
    @property
    def num_truncated(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def rows_by_source(self) -> Mapping[str, int]: ...


class Trainer(Protocol):
    """One algorithm with its data and workers."""

    @property
    def total_steps(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...

    def train_step(self, step: int) -> dict[str, float]: ...
    def validate(self, step: int) -> dict[str, float]: ...
    def finished(self) -> bool:
        """Whether the run may end before total_steps."""
        ...

    def sample_rollouts(self, count: int) -> list[dict[str, Any]]:
        """Some rollouts of the last step, for a reader."""
        ...

    def save(self, path: str) -> None: ...
    def close(self) -> None: ...
    def data_summary(self) -> Mapping[str, Counted]: ...


def run(cfg: RunConfig, make_trainer: Callable[[RunConfig], Trainer]) -> None:
    """Train to the end. Leaves in the run folder: config.yaml, metrics.jsonl, rollouts.jsonl, curves.png, final/."""
    setup_logging("controller")
    folder = Path(cfg.trainer.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(cfg), encoding="utf-8")
    (folder / ROLLOUTS_FILE).unlink(missing_ok=True)
    progress = Progress()
    progress.say(format_table(batch_table(cfg)))
    progress.say(format_table(layout_table(cfg, read_model_shape(cfg.model.path))))
    with progress.phase("load data, start workers"):
        trainer = make_trainer(cfg)
    sinks: list[Sink] = []
    try:
        for line in summary_lines(trainer.data_summary(), cfg.data.mix_weights):
            progress.say(line)
        names = cfg.trainer.logger
        sinks = open_sinks(
            names,
            folder,
            project=cfg.trainer.project_name,
            experiment=cfg.trainer.experiment_name,
            settings=to_dict(cfg),
        )
        _steps(cfg, trainer, sinks, progress, folder)
    finally:
        trainer.close()
        for sink in sinks:
            sink.close()
    plot_curves(folder / METRICS_FILE, folder / "curves.png", f"{cfg.algorithm.name}: {cfg.trainer.experiment_name}")
    progress.say(f"run folder: {folder} (config.yaml, metrics.jsonl, rollouts.jsonl, curves.png, final/)")


def summary_lines(sets: Mapping[str, Counted], mix_weights: Mapping[str, float]) -> list[str]:
    """Rows read, left out, cut and taken from a cache, by set; used rows and shares by source (contract R6)."""
    lines: list[str] = []
    for name, data in sets.items():
        cached = f"; tokens of {data.num_cached:,} rows were kept from an earlier run" if data.num_cached else ""
        lines.append(
            f"{name}: {data.num_rows:,} rows, {data.num_filtered:,} left out and {data.num_truncated:,} cut for "
            f"length{cached}"
        )
        mix = mix_weights if name == "train" else {}
        if len(data.rows_by_source) > 1 or mix:
            parts = [
                f"{source} {count:,} rows"
                + (f" for {mix[source] / sum(mix.values()):.1%} of the samples" if mix else "")
                for source, count in data.rows_by_source.items()
            ]
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def _steps(cfg: RunConfig, trainer: Trainer, sinks: list[Sink], progress: Progress, folder: Path) -> None:
    total = trainer.total_steps
    # A collection of everything that the imports have left takes half a second, in the middle of some step.
    gc.collect()
    gc.freeze()
    if cfg.trainer.val_before_train and cfg.trainer.test_freq != 0:
        _validate(trainer, 0, {}, sinks, progress, total)
    with progress.bar("train", total, every_s=None) as advance:
        for step in range(1, total + 1):
            set_step(step)
            metrics = trainer.train_step(step)
            last = step == total or trainer.finished()
            if _due_for_validation(cfg, trainer, step, last):
                _validate(trainer, step, metrics, sinks, progress, total)
            else:
                _record(step, metrics, sinks)
            if "console" in cfg.trainer.logger and _shown(cfg, step, last):
                progress.say(step_line(step, total, metrics))
            _keep_rollouts(folder, step, trainer.sample_rollouts(cfg.trainer.num_logged_rollouts))
            if cfg.trainer.save_freq > 0 and step % cfg.trainer.save_freq == 0:
                _save(trainer, folder / f"global_step_{step}" / "actor", progress)
            advance(1)
            if last:
                break
    if cfg.trainer.save_freq != 0:
        _save(trainer, folder / "final", progress)


def _shown(cfg: RunConfig, step: int, last: bool) -> bool:
    """SFT steps are many and alike: every tenth is printed. metrics.jsonl holds them all."""
    return last or cfg.algorithm.name != "sft" or step % 10 == 0


def _due_for_validation(cfg: RunConfig, trainer: Trainer, step: int, last: bool) -> bool:
    frequency = cfg.trainer.test_freq
    if frequency == 0:
        return False
    epoch_end = cfg.algorithm.name == "sft" and step % trainer.steps_per_epoch == 0
    return last or (step % frequency == 0 if frequency > 0 else epoch_end)


def _validate(
    trainer: Trainer, step: int, metrics: dict[str, float], sinks: list[Sink], progress: Progress, total: int
) -> None:
    start = time.perf_counter()
    found = trainer.validate(step)
    if not found and not metrics:
        return
    _record(step, metrics | found | ({"time/validate": time.perf_counter() - start} if found else {}), sinks)
    if found:
        progress.say(f"validation  {step_line(step, total, found)}")


def _record(step: int, metrics: Mapping[str, float], sinks: list[Sink]) -> None:
    for sink in sinks:
        sink.write(step, metrics)


def _keep_rollouts(folder: Path, step: int, rollouts: list[dict[str, Any]]) -> None:
    if not rollouts:
        return
    with (folder / ROLLOUTS_FILE).open("a", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps({"step": step, **rollout}, default=str) + "\n")


def _save(trainer: Trainer, path: Path, progress: Progress) -> None:
    start = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.save(str(path))
    progress.say(f"saved {path} in {time.perf_counter() - start:.1f} s")
