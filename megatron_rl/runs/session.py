"""A run from its folder to its curves: log, validate, save, draw, close around the steps of a loop. No algorithm."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from megatron_rl.cluster import stop
from megatron_rl.config.checks.folders import ROOT_KEY
from megatron_rl.config.load import dump_yaml, to_dict
from megatron_rl.config.run import RunConfig
from megatron_rl.config.tables import batch_table, format_table, layout_table
from megatron_rl.errors import ConfigError, DataError, Fault, MissingDependency
from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.observe.curves import plot_curves
from megatron_rl.observe.log import set_step, setup_logging
from megatron_rl.observe.progress import Progress
from megatron_rl.observe.sinks import METRICS_FILE, Sinks, open_sinks, require_sinks
from megatron_rl.observe.step_line import step_line
from megatron_rl.observe.versions import run_record
from megatron_rl.runs.folder import RunFolder, claim, remove_run
from megatron_rl.runs.loop import Loop, LoopTrainer, OneStep, StepT, synchronous
from megatron_rl.runs.state import RunState
from megatron_rl.runs.validation import SampleRow

logger = logging.getLogger(__name__)

STOPPING = "the run saves its weights, then ends; a second signal ends it at once"
CONFIG_FILE = "config.yaml"
ROLLOUTS_FILE = "rollouts.jsonl"
RECORD_FILE = "run.json"
"""Versions, commit, command line and time of the start."""


def run(
    cfg: RunConfig,
    make_trainer: Callable[[RunConfig], LoopTrainer[StepT]],
    loop: Loop[StepT] = synchronous,
    saved: Mapping[str, Any] | None = None,
) -> None:
    """Train to the end. Leaves in the run folder: config.yaml, run.json, metrics.jsonl,
    rollouts.jsonl, curves.png, final/.

    Everything that is refused is found before the folder changes: an earlier run in it stays as it was. A signal that
    asks the run to end (cluster/stop.py) has it save first; then Stopped is raised, which says where.

    make_trainer: builds a trainer, which this starts and closes. saved: a RunState to go on from.
    """
    setup_logging("controller")
    record = run_record()
    progress = Progress()
    with stop.signals(STOPPING), claim(cfg.trainer) as folder:
        if folder.path != Path(cfg.trainer.run_dir):
            progress.say(f"{cfg.trainer.run_dir} holds a run: this one is {folder.path} (trainer.overwrite=number)")
            cfg = replace(cfg, trainer=replace(cfg.trainer, experiment_name=folder.path.name))
        progress.say(format_table(batch_table(cfg)))
        progress.say(format_table(layout_table(cfg, read_model_shape(cfg.model.path))))
        require_sinks(cfg.trainer.logger)
        attempt(RunInFolder(cfg, folder, make_trainer, loop, progress, record), saved)
        _draw_curves(cfg, folder.path)
        progress.say(
            f"run folder: {folder.path} (config.yaml, run.json, metrics.jsonl, rollouts.jsonl, curves.png, final/)"
        )


@dataclass(frozen=True)
class RunInFolder(Generic[StepT]):
    """A run that has claimed its folder: all that the lives of its trainers share."""

    cfg: RunConfig
    folder: RunFolder
    make_trainer: Callable[[RunConfig], LoopTrainer[StepT]]
    loop: Loop[StepT]
    progress: Progress
    record: Mapping[str, object]
    """What run.json shall hold of this start."""


def attempt(run: RunInFolder[StepT], saved: Mapping[str, Any] | None = None) -> None:
    """One life of a trainer: built, started, trained to the end of the run, closed. After an error the next attempt
    builds a fresh one in the same folder. saved: as of `run`.
    """
    trainer = run.make_trainer(run.cfg)
    try:
        with run.progress.phase("load data, start workers"):
            trainer.start()
        for line in trainer.summary():
            run.progress.say(line)
        _Life(run, trainer, saved).train()
    finally:
        trainer.close()


class _Life(Generic[StepT]):
    """The steps of a run with one trainer, and what is written around them."""

    def __init__(
        self, run: RunInFolder[StepT], trainer: LoopTrainer[StepT], saved: Mapping[str, Any] | None
    ) -> None:
        self._record, self._loop = run.record, run.loop
        self._cfg, self._trainer, self._folder, self._progress = run.cfg, trainer, run.folder, run.progress
        cfg = run.cfg
        self._total = trainer.total_steps
        self._sinks = Sinks([])
        self._samples_fail = False
        self._start = time.perf_counter()
        self._buffer: RolloutBuffer[StepT] = RolloutBuffer(cfg.trainer.max_staleness or 0)
        self._state = RunState({**trainer.stateful(), "buffer": self._buffer})
        if saved is not None:
            self._state.restore(saved)
        self._first = self._state.step + 1
        self._saved: Path | None = None
        """The newest save, where it holds the weights of the last step."""
        self._unwritten: tuple[int, dict[str, float]] | None = None
        """A step's figures that no sink has been given yet."""

    def train(self) -> None:
        """All steps. The folder begins to be this run's after the first validation, the last work that may refuse."""
        # A collection of everything that the imports have left takes half a second, in the middle of some step.
        gc.collect()
        gc.freeze()
        try:
            found = self._validated(0) if self._validates_first() else {}
            self._begin()
            self._note_validation(0, {}, found)
            self._start = time.perf_counter()
            with (
                self._progress.bar("train", self._total, every_s=None) as advance,
                self._loop(self._trainer, self._buffer, self._state) as one_step,
            ):
                for step in range(self._first, self._total + 1):
                    set_step(step)
                    if self._step(step, one_step):
                        break
                    advance(1)
        except KeyboardInterrupt as interrupt:
            raise stop.Stopped(self._save_and_say()) from interrupt
        finally:
            if self._unwritten is not None:
                self._sinks.write(*self._unwritten)
            self._sinks.close()

    def _validates_first(self) -> bool:
        trainer = self._cfg.trainer
        return trainer.val_before_train and trainer.test_freq != 0 and self._state.step == 0

    def _save_and_say(self) -> str:
        """Save what is not saved yet, as the weights of the last step that is complete; what became of them."""
        signal = stop.received()
        who = f"stopped by {signal.name if signal else 'an interrupt'}"
        if self._state.step == 0:
            if self._folder.is_begun:
                remove_run(self._folder.path)
            return f"{who} before the first step was complete: there are no new weights"
        who = f"{who} after step {self._state.step}"
        if self._saved is None and self._cfg.trainer.save_freq == 0:
            return f"{who}: trainer.save_freq is 0, so no weights are kept"
        if self._saved is None:
            self._save(self._folder.path / f"global_step_{self._state.step}" / "actor")
        return f"{who}: its weights are in {self._saved}"

    def _begin(self) -> None:
        cfg, folder = self._cfg, self._folder
        folder.begin()
        try:
            (folder.path / CONFIG_FILE).write_text(dump_yaml(cfg), encoding="utf-8")
            (folder.path / RECORD_FILE).write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")
            sinks = open_sinks(
                cfg.trainer.logger,
                folder.path,
                project=cfg.trainer.project_name,
                experiment=cfg.trainer.experiment_name,
                # Step 0 is the validation before the first step.
                first_step=self._first if self._state.step else 0,
                settings=to_dict(cfg),
            )
            self._sinks = Sinks(sinks)
        except BaseException as error:
            # A half folder would stand in the way of the next try.
            remove_run(folder.path)
            folder.is_begun = False
            if isinstance(error, OSError):
                reason = f"{folder.path} cannot be written ({error.strerror or error})"
                cure = "name a folder that can be, or free some space"
                raise ConfigError([Fault(ROOT_KEY, cfg.trainer.default_local_dir, reason, cure)]) from error
            raise

    def _step(self, step: int, one_step: OneStep) -> bool:
        """One step with its save, validation and samples; whether it was the last."""
        cfg, trainer = self._cfg, self._trainer
        with stop.one_step():
            result = one_step(step)
            metrics = result.metrics
            done = step + 1 - self._first
            metrics["perf/left_s"] = (time.perf_counter() - self._start) / done * (self._total - step)
            self._state.step, self._saved, self._unwritten = step, None, (step, metrics)
        last = step == self._total or trainer.finished()
        if "console" in cfg.trainer.logger and _shown(cfg, step, last):
            self._progress.say(step_line(step, self._total, metrics))
        # Saved first: an error in validation or in the writing of samples costs no weights.
        self._save_if_due(step, last)
        found = self._validated(step) if _due_for_validation(cfg, trainer, step, last) else {}
        with stop.held():
            self._note_validation(step, metrics, found)
            self._keep_samples(step, result.samples)
        return last

    def _save_if_due(self, step: int, last: bool) -> None:
        frequency = self._cfg.trainer.save_freq
        if frequency > 0 and step % frequency == 0:
            self._save(self._folder.path / f"global_step_{step}" / "actor")
        if last and frequency != 0:
            self._save(self._folder.path / "final")

    def _save(self, path: Path) -> None:
        start = time.perf_counter()
        with stop.held():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._trainer.save(str(path))
            self._saved = path
        self._progress.say(f"saved {path} in {time.perf_counter() - start:.1f} s")

    def _validated(self, step: int) -> dict[str, float]:
        start = time.perf_counter()
        metrics = self._trainer.validate(step).metrics
        return metrics | {"time/validate": time.perf_counter() - start} if metrics else {}

    def _note_validation(self, step: int, metrics: dict[str, float], found: dict[str, float]) -> None:
        if found or metrics:
            self._unwritten = None
            self._sinks.write(step, metrics | found)
        if found:
            shown = {name: value for name, value in found.items() if name != "time/validate"}
            self._progress.say(f"validation  {step_line(step, self._total, shown)}")

    def _keep_samples(self, step: int, rollouts: Sequence[SampleRow]) -> None:
        lines = [json.dumps({"step": step, **rollout}, default=str) + "\n" for rollout in rollouts]
        if not lines:
            return
        file = self._folder.path / ROLLOUTS_FILE
        try:
            with file.open("a", encoding="utf-8") as handle:
                handle.writelines(lines)
        except OSError as error:
            if not self._samples_fail:
                logger.warning("%s: samples of step %d are lost (%s); training goes on", file, step, error)
            self._samples_fail = True


def _shown(cfg: RunConfig, step: int, last: bool) -> bool:
    """SFT steps are many and alike: every tenth is printed. metrics.jsonl holds them all."""
    return last or step % cfg.needs.prints_every == 0


def _due_for_validation(cfg: RunConfig, trainer: LoopTrainer[StepT], step: int, last: bool) -> bool:
    frequency = cfg.trainer.test_freq
    if frequency == 0:
        return False
    epoch_end = cfg.needs.validates == "epochs" and step % trainer.steps_per_epoch == 0
    return last or (step % frequency == 0 if frequency > 0 else epoch_end)


def _draw_curves(cfg: RunConfig, folder: Path) -> None:
    title = f"{cfg.algorithm.name}: {cfg.trainer.experiment_name}"
    try:
        plot_curves(folder / METRICS_FILE, folder / "curves.png", title)
    except (OSError, DataError, MissingDependency) as error:
        logger.warning("curves.png was not drawn: %s", error)
