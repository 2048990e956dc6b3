"""A run from its folder to its curves: resume, log, validate, save, draw, close around steps. No algorithm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from megatron_rl.cluster import stop
from megatron_rl.cluster.nodes_return import wait_for_nodes
from megatron_rl.cluster.stop import Stopped
from megatron_rl.config.checks.folders import ROOT_KEY
from megatron_rl.config.checks.model import read_actor_shape
from megatron_rl.config.run import RunConfig
from megatron_rl.config.tables import batch_table, format_table, layout_table
from megatron_rl.errors import (
    BrokenCheckpoint,
    ClusterError,
    ConfigError,
    DataError,
    Fault,
    MegatronRLError,
    MissingDependency,
    P2PError,
)
from megatron_rl.experience.buffer import RolloutBuffer
from megatron_rl.models.changes import OVERRIDE, describe_changes
from megatron_rl.models.config_json import read_config
from megatron_rl.observe.curves import plot_curves
from megatron_rl.observe.garbage import leave_out_what_is_there
from megatron_rl.observe.log import set_step, setup_logging
from megatron_rl.observe.progress import Progress
from megatron_rl.observe.run_status import LastCheckpoint, StatusWriter
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics, require_sinks
from megatron_rl.observe.step_line import step_line
from megatron_rl.observe.versions import run_record, versions
from megatron_rl.runs import resume
from megatron_rl.runs.checkpoints import FORMAT, Checkpoints, step_of
from megatron_rl.runs.closing import closing, failure_of
from megatron_rl.runs.early_stop import EarlyStop, require_metrics
from megatron_rl.runs.files import RunFiles, sample_lines
from megatron_rl.runs.folder import RunFolder, claim, remove_run, remove_unfinished
from megatron_rl.runs.loop import Loop, LoopTrainer, OneStep, StepT, synchronous
from megatron_rl.runs.model_saves import ModelSaves
from megatron_rl.runs.restarts import Restarts
from megatron_rl.runs.resume import PATIENCE, VALIDATED, Row, Start, validation_after
from megatron_rl.runs.state import RunState
from megatron_rl.runs.time_limit import TimeLimit

logger = logging.getLogger(__name__)

STOPPING = "the run saves a checkpoint and its weights, then ends; a second signal ends it at once"
TIME_KEY = "trainer.max_time"


def run(
    cfg: RunConfig, make_trainer: Callable[[RunConfig], LoopTrainer[StepT]], loop: Loop[StepT] = synchronous
) -> None:
    """Train to the end. Leaves in the run folder: config.yaml, run.json, metrics.jsonl, rollouts.jsonl, curves.png, and
    the folders checkpoints and final.

    A run begun again goes on from its newest checkpoint (trainer.resume_mode). Everything that is refused is found
    before the folder changes: an earlier run in it stays as it was. A signal that asks the run to end (cluster/stop.py)
    has it save first; then Stopped is raised, which says where; so it is where trainer.max_time is over.

    make_trainer: builds a trainer, which this starts and closes.
    """
    setup_logging("controller")
    record = run_record()
    progress = Progress()
    restarts = Restarts(cfg.trainer, progress.say, lambda: wait_for_nodes(cfg.cluster, progress.say))
    broken: dict[Path, str] = {}
    with stop.signals(STOPPING):
        while True:
            start, folder = _claimed(cfg, broken)
            with folder:
                try:
                    status = StatusWriter(folder.path)
                    of_run = (make_trainer, loop, progress, record, restarts, status)
                    _run(RunInFolder(start.cfg, folder, *of_run), start)
                    return
                except BrokenCheckpoint as error:
                    # Only the ranks look at checksums, each at its share.
                    if start.checkpoint is None:
                        raise
                    broken[start.checkpoint.path] = str(error)


def _claimed(cfg: RunConfig, broken: Mapping[Path, str]) -> tuple[Start, RunFolder]:
    """How the run begins, and the folder that it has claimed for that."""
    start = resume.look(cfg, broken)
    folder = claim(start.cfg.trainer, start.in_place, start.why_not)
    if not start.in_place:
        trainer = replace(cfg.trainer, experiment_name=folder.path.name)
        return replace(start, cfg=replace(cfg, trainer=trainer)), folder
    # Another start may have used the folder between the first look and the lock.
    start = resume.look(cfg, broken)
    if start.in_place:
        return start, folder
    folder.release()
    return start, claim(start.cfg.trainer, why_not=start.why_not)


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
    restarts: Restarts
    status: StatusWriter


def _run(run: RunInFolder[StepT], start: Start) -> None:
    cfg, folder, progress = run.cfg, run.folder.path, run.progress
    for line in start.lines:
        progress.say(line)
    if not start.in_place and start.why_not and cfg.trainer.overwrite == "number":
        progress.say(f"the folder that was asked for holds a run: this one is {folder} (trainer.overwrite=number)")
    progress.say(format_table(batch_table(cfg)))
    changes = cfg.model.override_config
    for line in describe_changes(read_config(cfg.model.path)[0] or {}, changes):
        progress.say(f"{OVERRIDE}: {line}")
    progress.say(format_table(layout_table(cfg, read_actor_shape(cfg))))
    require_sinks(cfg.trainer.logger)
    with run.status.told_end():
        _attempts(run, start)
    _draw_curves(cfg, folder)
    progress.say(f"run folder: {folder} (config.yaml, run.json, metrics.jsonl, rollouts.jsonl, curves.png, final/)")


def _attempts(run: RunInFolder[StepT], start: Start) -> None:
    """As many lives of a trainer as it takes (trainer.max_restarts)."""
    broken: dict[Path, str] = {}
    while True:
        try:
            attempt(run, start)
            return
        except BrokenCheckpoint as error:
            if run.restarts.count == 0 or start.checkpoint is None:
                raise
            broken[start.checkpoint.path] = str(error)
        except MegatronRLError as error:
            run.restarts.take(error)
        # Outside of the handlers: the error holds the trainer, and all that was built with it.
        run.status.restarted(run.restarts.count)
        run.restarts.wait()
        if run.folder.is_begun:
            start = resume.look_again(run.cfg, broken)
        for line in start.lines:
            run.progress.say(line)


def attempt(run: RunInFolder[StepT], start: Start) -> None:
    """One life of a trainer: built, started, trained to the end of the run, closed. After an error the next attempt
    builds a fresh one in the same folder; resume.look_again says from where.
    """
    trainer = run.make_trainer(run.cfg)
    trainer.tell(run.status.during)

    def close() -> None:
        with run.status.during("close"):
            trainer.close()

    with closing("the workers", close):
        life = _Life(run, trainer, start)
        try:
            with run.progress.phase("load data, start workers"):
                trainer.start(start.checkpoint)
            for line in trainer.summary():
                run.progress.say(line)
            life.train()
        except KeyboardInterrupt as interrupt:
            raise life.stopped() from interrupt


class _Life(Generic[StepT]):
    """The steps of a run with one trainer, and what is written around them."""

    def __init__(self, run: RunInFolder[StepT], trainer: LoopTrainer[StepT], start: Start) -> None:
        """The run's parts go on from the start's checkpoint, if it has one; the models do once the trainer starts."""
        cfg = self._cfg = run.cfg
        self._record, self._loop, self._from, self._restarts = run.record, run.loop, start, run.restarts
        self._trainer, self._folder, self._progress = trainer, run.folder, run.progress
        self._status = run.status
        self._files = RunFiles(run.folder.path, cfg)
        self._checkpoints = Checkpoints(
            run.folder.path, cfg.checkpoint, trainer, run.progress.say, self._tell_checkpoint
        )
        self._models = ModelSaves(trainer, run.progress.say)
        saved = start.checkpoint
        self._early_stop = EarlyStop(cfg.trainer.early_stop, saved.state.get(PATIENCE) if saved else None)
        self._limit = TimeLimit(cfg.trainer.max_time)
        self._time_is_over = False
        self._start = time.perf_counter()
        self._buffer: RolloutBuffer[StepT] = RolloutBuffer(cfg.trainer.max_staleness or 0)
        self._state = RunState({**trainer.stateful(), "buffer": self._buffer})
        if start.checkpoint is not None:
            self._state.restore(start.checkpoint.state["run"])
        self._done_before = self._state.step
        """Steps that were complete when this life began."""
        self._snapshot: dict[str, Any] = {}
        """What a checkpoint of the last complete step holds beside the models: the step that follows may have moved on
        in the data already."""
        self._saved: Path | None = None
        """The newest save, where it holds the weights of the last step."""
        self._unwritten: tuple[int, dict[str, float]] | None = None
        """A step's figures that no sink has been given yet."""

    def train(self) -> None:
        """All steps. The folder begins to be this run's after the first validation, the last work that may refuse."""
        # A collection of everything that the imports have left takes half a second, in the middle of some step.
        leave_out_what_is_there()
        total = self._trainer.total_steps
        self._static = self._facts()
        try:
            found = self._validated(0) if self._validates_first() else {}
            if saved := self._from.checkpoint:
                self._early_stop.note(saved.step, validation_after(saved))
            self._begin()
            self._note_validation(0, {}, found)
            if self._done_before and self._early_stop.ends and not self._is_saved:
                # The start before was killed after the validation that ended the run.
                self._save_final()
            self._start = time.perf_counter()
            with (
                self._progress.bar("train", total, every_s=None) as advance,
                self._loop(self._trainer, self._buffer, self._state) as one_step,
            ):
                advance(self._done_before)
                for step in self._steps_to_do():
                    set_step(step)
                    if self._step(step, one_step):
                        break
                    advance(1)
            self._finish_saves()
            self._tell_how_it_ended()
        except Exception as error:
            self._keep_what_is_under_way(error)
            raise
        finally:
            if self._unwritten is not None:
                self._files.write_row(*self._unwritten)
            self._files.close()

    def _steps_to_do(self) -> Iterator[int]:
        """Numbers of the steps, until the time is over."""
        if self._done_before and (self._trainer.finished() or self._early_stop.ends):
            return
        for step in range(self._done_before + 1, self._trainer.total_steps + 1):
            if self._limit.is_over():
                self._time_is_over = True
                if self._state.step == self._done_before:
                    reason = "is over before one more step is complete"
                    raise ConfigError([Fault(TIME_KEY, self._cfg.trainer.max_time, reason, "give more time")])
                raise Stopped
            yield step

    def _keep_what_is_under_way(self, error: Exception) -> None:
        """Let saves that are under way become whole, where the ranks still answer."""
        if isinstance(error, ClusterError | P2PError) or self._models.has_failed:
            return
        further = failure_of(self._finish_saves)
        if further is not None:
            error.add_note(f"what was being saved is lost: {further}")

    def _validates_first(self) -> bool:
        trainer = self._cfg.trainer
        return trainer.val_before_train and trainer.test_freq != 0 and self._state.step == 0

    # The end by a signal, or by the clock.

    def stopped(self) -> Stopped:
        """Save what is not saved yet of the last step that is complete: a checkpoint, then the model."""
        signal = stop.received()
        who = f"stopped by {signal.name if signal else 'an interrupt'}"
        if self._time_is_over:
            who = f"ended by {TIME_KEY} {self._cfg.trainer.max_time}"
        if self._state.step == self._done_before:
            return self._stopped_before_a_step(who)
        step, cfg = self._state.step, self._cfg
        path = None if cfg.checkpoint.freq == 0 else self._checkpoint_of(step)
        made = f"its checkpoint is {path}" if path else "its checkpoint could not be written"
        if cfg.checkpoint.freq == 0:
            made = "checkpoint.freq is 0, so no checkpoint is kept"
        self._finish_saves()
        if self._saved is None and cfg.trainer.model_freq != 0:
            self._save(self._folder.path / f"global_step_{step}" / "actor", background=False)
        off = "trainer.save_freq is 0" if cfg.trainer.save_hf else "trainer.save_hf is false"
        kept = f"its weights are in {self._saved}" if self._saved else f"{off}, so no weights are kept"
        return Stopped(f"{who} after step {step}: {made}; {kept}", can_go_on=path is not None)

    def _stopped_before_a_step(self, who: str) -> Stopped:
        before, checkpoint = self._done_before, self._from.checkpoint
        if self._folder.is_begun and not self._from.in_place:
            self._status.discard()
            remove_run(self._folder.path)
        if checkpoint is None:
            return Stopped(f"{who} before the first step was complete: there is nothing to save")
        text = f"{who} before step {before + 1} was complete: the newest checkpoint is still {checkpoint.path}"
        return Stopped(text, can_go_on=True)

    def _finish_saves(self) -> None:
        """Wait for what is being written. The model comes first: a checkpoint that is whole says that the models of its
        step and of those before are, too.
        """
        with stop.held(), self._status.during("save"):
            self._models.finish()
            self._checkpoints.finish()

    def _checkpoint_of(self, step: int) -> Path | None:
        """The step's checkpoint, written now if it is not there."""
        self._finish_saves()
        last = self._checkpoints.last
        return last if last and step_of(last) == step else self._checkpoints.begin(step, self._snapshot, False)

    # The folder.

    def _begin(self) -> None:
        cfg, folder, in_place = self._cfg, self._folder, self._from.in_place
        folder.begin(goes_on=in_place)
        try:
            row = Row.of(self._from.checkpoint) if in_place and self._from.checkpoint else None
            is_whole = row is not None and row.is_in(folder.path / METRICS_FILE)
            first = self._done_before + (0 if row and not is_whole else 1)
            if row is not None:
                self._checkpoints.clear(row.step)
                for line in remove_unfinished(folder.path):
                    self._progress.say(line)
            # Step 0 is the validation before the first step.
            self._files.begin(self._record, first if self._done_before else 0, in_place)
            if in_place and cfg.checkpoint.keep_best:
                for one in read_metrics(folder.path / METRICS_FILE):
                    self._checkpoints.note(int(one["step"]), one)
        except BaseException as error:
            if not in_place:
                # A half folder would stand in the way of the next try.
                remove_run(folder.path)
                folder.is_begun = False
            if isinstance(error, OSError):
                reason = f"{folder.path} cannot be written ({error.strerror or error})"
                cure = "name a folder that can be, or free some space"
                raise ConfigError([Fault(ROOT_KEY, cfg.trainer.default_local_dir, reason, cure)]) from error
            raise
        saved = self._from.checkpoint if in_place else None
        self._status.begin(total=self._trainer.total_steps, step=self._done_before)
        if saved is not None:
            self._tell_checkpoint(saved.path)
        if row is not None and not is_whole:
            self._complete(row)

    def _complete(self, row: Row) -> None:
        """What the start before was killed in, once the checkpoint of the step was whole."""
        assert self._from.checkpoint is not None
        step, metrics = row.step, dict(row.metrics)
        self._unwritten = (step, metrics)
        if self._from.checkpoint.state["is_last"] and not self._is_saved:
            self._save_if_due(step, last=True)
        found = self._validated(step) if row.validates else {}
        with stop.held():
            self._files.write_samples(step, row.samples)
            self._note_validation(step, metrics, found)

    @property
    def _is_saved(self) -> bool:
        return (self._folder.path / "final").is_dir()

    def _end_early(self, step: int) -> None:
        """The saves of a last step, of one that was found to be the last by its validation."""
        self._snapshot |= {"is_last": True, PATIENCE: self._early_stop.state()}
        self._save_final()
        if not _due_for_checkpoint(self._cfg, step, last=False, validates=True):
            self._checkpoint_if_due(step, last=True, validates=True)

    def _save_final(self) -> None:
        if self._cfg.trainer.model_freq != 0:
            self._save(self._folder.path / "final", self._cfg.checkpoint.async_save)

    def _tell_how_it_ended(self) -> None:
        """Why the run ended before its last step, and which checkpoint is the best one."""
        lines = [f"ended after step {self._state.step}: {self._early_stop.ends}"] if self._early_stop.ends else []
        best, name = self._checkpoints.best(), self._cfg.checkpoint.keep_best
        if best is not None:
            lines.append(f"best {name}: {best[1]:.6g} at step {step_of(best[0])}, in {best[0]}")
        for line in lines:
            self._progress.say(line)
        self._status.tell("; ".join(lines))

    def _tell_checkpoint(self, path: Path) -> None:
        self._status.checkpoint_done(LastCheckpoint.of(path, step_of(path)))

    def _facts(self) -> dict[str, Any]:
        """What all checkpoints of this life say alike."""
        mode, checkpoint = self._cfg.trainer.resume_mode, self._from.checkpoint
        origin = mode if checkpoint is not None and not self._from.in_place else None
        if checkpoint is not None and self._from.in_place:
            origin = checkpoint.state["origin"]
        return {
            "format": FORMAT,
            **resume.config_facts(self._cfg),
            "versions": versions(),
            "origin": origin,
            "total_steps": self._trainer.total_steps,
            "steps_per_epoch": self._trainer.steps_per_epoch,
        }

    # A step.

    def _step(self, step: int, one_step: OneStep) -> bool:
        """One step with its saves, validation and samples; whether it was the last."""
        cfg, trainer, began = self._cfg, self._trainer, time.perf_counter()
        with stop.held():
            # A checkpoint waits for the model before it.
            if self._models.poll():
                self._checkpoints.poll()
        with stop.one_step():
            result = one_step(step)
            metrics = result.metrics
            if step == self._done_before + 1:
                require_metrics(cfg, metrics, of_validation=False)
            done = step - self._done_before
            metrics["perf/left_s"] = (time.perf_counter() - self._start) / done * (trainer.total_steps - step)
            if self._checkpoints.failures:
                metrics["checkpoint/failures"] = float(self._checkpoints.failures)
            last = step == trainer.total_steps or trainer.finished()
            validates = _due_for_validation(cfg, trainer, step, last)
            row = Row(step, dict(metrics), sample_lines(step, result.samples), validates)
            self._state.step, self._saved, self._unwritten = step, None, (step, metrics)
            self._status.step_done(step)
            facts = resume.step_facts(self._state.state(), row)
            self._snapshot = {**self._static, **facts, "is_last": last, PATIENCE: self._early_stop.state()}
        if "console" in cfg.trainer.logger and _shown(cfg, step, last):
            self._progress.say(step_line(step, trainer.total_steps, metrics))
        # Saved first: an error in validation costs no weights.
        self._save_if_due(step, last, validates)
        self._checkpoint_if_due(step, last, validates)
        found = self._validated(step) if validates else {}
        with stop.held():
            self._files.write_samples(step, row.samples)
            self._note_validation(step, metrics, found)
        if not last and self._early_stop.ends:
            last = True
            self._end_early(step)
        self._restarts.step_done(step)
        self._limit.note_step(time.perf_counter() - began)
        self._limit.note_save("checkpoint", self._checkpoints.longest_s)
        self._limit.note_save("model", self._models.longest_s)
        return last

    def _checkpoint_if_due(self, step: int, last: bool, validates: bool) -> None:
        if _due_for_checkpoint(self._cfg, step, last, validates):
            with stop.held(), self._status.during("save"):
                self._checkpoints.begin(step, self._snapshot, self._cfg.checkpoint.async_save)

    def _save_if_due(self, step: int, last: bool, validates: bool = False) -> None:
        background, frequency = self._cfg.checkpoint.async_save, self._cfg.trainer.model_freq
        if _due_for_checkpoint(self._cfg, step, last, validates):
            # The checkpoint before becomes whole now, and its models come before it; this one's may take their time.
            self._finish_saves()
        if frequency > 0 and step % frequency == 0:
            self._save(self._folder.path / f"global_step_{step}" / "actor", background)
        if last:
            self._save_final()

    def _save(self, path: Path, background: bool) -> None:
        with stop.held(), self._status.during("save"):
            self._models.begin(path, background)
            self._saved = path

    def _validated(self, step: int) -> dict[str, float]:
        start = time.perf_counter()
        with self._status.during("validate"):
            metrics = self._trainer.validate(step).metrics
        if metrics:
            require_metrics(self._cfg, metrics, of_validation=True)
        return metrics | {VALIDATED: time.perf_counter() - start} if metrics else {}

    def _note_validation(self, step: int, metrics: dict[str, float], found: dict[str, float]) -> None:
        if found or metrics:
            self._unwritten = None
            self._files.write_row(step, metrics | found)
            self._checkpoints.note(step, metrics | found)
            self._early_stop.note(step, found)
        if found:
            shown = {name: value for name, value in found.items() if name != VALIDATED}
            self._progress.say(f"validation  {step_line(step, self._trainer.total_steps, shown)}")


def _shown(cfg: RunConfig, step: int, last: bool) -> bool:
    """SFT steps are many and alike: every tenth is printed. metrics.jsonl holds them all."""
    return last or step % cfg.needs.prints_every == 0


def _due_for_checkpoint(cfg: RunConfig, step: int, last: bool, validates: bool) -> bool:
    """With checkpoint.keep_best each validation has a checkpoint: the best step cannot be one without."""
    frequency = cfg.checkpoint_freq
    if cfg.checkpoint.keep_best is not None and (validates or last):
        return True
    return frequency > 0 and (last or step % frequency == 0)


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
