"""One run as an object: the flow of its algorithm over its parts, and the three verbs of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.run import RunConfig
from megatron_rl.data.render import Renderer
from megatron_rl.errors import BrokenCheckpoint
from megatron_rl.flow.run import During, PartialRun
from megatron_rl.messages import first_of
from megatron_rl.observe.garbage import no_collections
from megatron_rl.observe.start_times import WORKERS, StartTimes, start_line, start_metrics, with_ranks
from megatron_rl.runs.checkpoints import Checkpoint
from megatron_rl.runs.closing import failure_of
from megatron_rl.runs.metrics import Metrics, StepSummary, readers, time_metrics, wall_seconds
from megatron_rl.runs.state import Stateful, stateful_parts
from megatron_rl.runs.summary import adapter_lines, summary_lines
from megatron_rl.runs.validation import SampleRow, Validation, validate
from megatron_rl.trainers import TRAINERS
from megatron_rl.trainers.parts import Parts
from megatron_rl.trainers.placement import Workers, start_workers
from megatron_rl.types import FileMark
from megatron_rl.workers.records import Role, SavedForm
from megatron_rl.workers.train import TrainWorker

_log = logging.getLogger(__name__)

SEAM = ("rollouts", "greedy")
"""What engines make: the values that stand between `take` and `learn`. Rewards lie behind it, so that scoring overlaps
the model passes."""


@dataclass(frozen=True)
class StepUnderWay:
    """What a step has made so far."""

    step: int
    version: int
    """Of the weights that the engines had."""
    run: PartialRun
    busy_s: float
    """Seconds that the slowest rank had been inside its methods when the step began."""


@dataclass(frozen=True)
class StepResult:
    """A step that is over."""

    metrics: Metrics
    samples: list[SampleRow]
    """Some of its rollouts, for a reader (trainer.num_logged_rollouts)."""


class Trainer:
    """Building one does nothing but check its flow: `describe`, `replace` and `insert_after` work. `start` acts.

    Example: trainer = Trainer(load_config(["configs/grpo-add2-1n1g.yaml"], []))
    print(trainer.flow.describe())
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.parts = Parts(cfg)
        self.flow = TRAINERS[cfg.algorithm.name](self.parts)
        self.flow.watch(readers(self.parts))
        self._sources = tuple(self.flow.sources)
        self._workers: Workers | None = None
        self._notes: list[str] = []
        self._start_seconds: dict[str, float] = {}
        self._first_metrics: dict[str, float] = {}
        """What the first step after the start reports beside its own."""

    def start(self, checkpoint: Checkpoint | None = None) -> Trainer:
        """Read data, start reward processes and workers, and give the engines their first weights: those of a
        checkpoint, if one is given (its other state is restored to `stateful` before this).

        Data and rewards come before any worker, so that bad input costs seconds. What was started is ended again if
        one of them fails.
        """
        parts, cfg = self.parts, self.cfg
        times = StartTimes()
        with times.phase("data"):
            # It imports transformers.
            with no_collections():
                renderer = Renderer.from_config(cfg.model, cfg.data)
            parts.data.read(renderer)
            if cfg.samples_prompts:
                parts.prompts.read(renderer)
        try:
            if cfg.has_rewards:
                with times.phase("rewards"):
                    parts.rewards.start()
                    parts.rewards.preflight([prompt for one in parts.prompts.sets.values() for prompt in one.items])
            with times.phase(WORKERS):
                workers = self._workers = self._start_workers()
            parts.models.start(workers.train)
            if checkpoint is not None:
                with times.phase("checkpoint"):
                    self._notes = load_models(workers.train, checkpoint)
            if cfg.has_rewards:
                with times.phase("reward models"):
                    parts.rewards.start_models()
            if cfg.has_engine:
                with times.phase("first sync"):
                    parts.sampler.start(workers.engines, renderer)
            self._start_seconds = with_ranks(times.seconds, workers.train.all(TrainWorker.start_seconds))
            self._first_metrics = start_metrics(self._start_seconds)
        except BaseException as error:
            further = failure_of(self.close)
            if further is not None:
                error.add_note(f"what was started could not be closed either: {further}")
            raise
        return self

    def _start_workers(self) -> Workers:
        cfg, steps = self.cfg, self.parts.data.total_steps
        # While a critic warms up the actor rests.
        warmup = cfg.trainer.critic_warmup if cfg.needs.critic else 0
        return start_workers(
            cfg,
            (steps - warmup) * cfg.updates_per_step,
            with_engine=cfg.has_engine,
            critic_optimizer_steps=steps * cfg.critic_updates_per_step if cfg.needs.critic else None,
        )

    # The three verbs of a step.

    def take(self, step: int) -> StepUnderWay:
        """The next rows of data and what the engines make of them."""
        if step in self.cfg.trainer.profile.steps:
            self.parts.models.group.all(TrainWorker.begin_profile, step)
        rows, number = self._sources[0], {"step": step} if "step" in self._sources else {}
        begun = self.flow.begin(**{rows: self.parts.data.next()}, **number)
        busy_s, version = self._busy_seconds(), self.parts.sampler.version
        made = self.flow.advance(begun, until=[value for value in SEAM if self.flow.makes(value)])
        return StepUnderWay(step, version, made, busy_s)

    def learn(self, taken: StepUnderWay) -> StepUnderWay:
        """Scores, credit, updates: everything up to the new weights."""
        self.parts.models.guard.step = taken.step
        before = "sync" if self.flow.makes("sync") else None
        return replace(taken, run=self.flow.advance(taken.run, before=before))

    def publish(self, learned: StepUnderWay) -> StepResult:
        """The new weights into the engines, and what is measured of the step.

        Raises RolloutError if engine and trainer have differed too much for too long.
        """
        end = self.flow.advance(learned.run)
        if learned.step in self.cfg.trainer.profile.steps:
            self._end_profile(learned.step)
        busy_s = self._busy_seconds() - learned.busy_s
        metrics, summary = dict[str, float](), StepSummary(0, [])
        for result in self.flow.read(end.values):
            if isinstance(result, StepSummary):
                summary = result
            elif isinstance(result, dict):
                metrics |= result
        metrics |= self._first_metrics
        self._first_metrics = {}
        if not self.cfg.needs.rollouts:
            seconds = wall_seconds(end.timings)
            metrics |= {"time/step": seconds, "perf/tokens_per_s": summary.num_tokens / seconds}
            return StepResult(metrics | self._per_gpu(metrics), [])
        metrics |= time_metrics(end.timings, summary.num_tokens, busy_s)
        metrics |= self._per_gpu(metrics)
        metrics |= self.parts.mismatch.look(learned.step, metrics) | self.parts.kl_control.metrics()
        return StepResult(metrics, summary.samples)

    # Around the steps.

    def tell(self, during: During) -> None:
        """Enter `during` with the name of each node of a step while it runs."""
        self.flow.during = during

    @property
    def total_steps(self) -> int:
        return self.parts.data.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.parts.data.steps_per_epoch

    def finished(self) -> bool:
        """Whether the run may end before total_steps: the running mean of the loss is below trainer.target_loss."""
        target, average = self.cfg.trainer.target_loss, self.parts.loss_average.value
        return self.cfg.needs.stops_at_loss and target is not None and average is not None and average < target

    def summary(self) -> list[str]:
        """What was read, for the run's first lines."""
        notes: dict[str, Sequence[str]] = {}
        if self.cfg.has_rewards:
            sets = self.parts.prompts.sets
            notes = {name: self.parts.rewards.notes(prompts.items) for name, prompts in sets.items()}
        sampled = self.parts.prompts.val if self.cfg.samples_prompts else None
        if sampled is None:
            lines = summary_lines(self.parts.data.sets, self.cfg.data.mix_weights, notes)
        else:
            lines = summary_lines(self.parts.data.sets, self.cfg.data.mix_weights)
            lines += summary_lines({"val prompts": sampled}, {}, {"val prompts": notes["val"]})
        if self.cfg.model.lora.rank:
            of_ranks = self.parts.models.group.all(TrainWorker.bound_layers, "actor")
            lines += adapter_lines(self.cfg, sorted({name for of_rank in of_ranks for name in of_rank}))
        return [*lines, *self._notes, start_line(self._start_seconds)]

    def validate(self, step: int) -> Validation:
        """Every validation row once (contract R4)."""
        return validate(self.parts, step)

    def stateful(self) -> dict[str, Stateful]:
        """What of the run has a state, by name."""
        return stateful_parts(self.parts)

    def save(self, path: str, background: bool = False) -> None:
        """See ModelStore. The actor, or its adapters in PEFT's form; a critic in the folder `critic` beside it."""
        group = self.parts.models.group
        group.rank0(TrainWorker.save, "actor", path, saved_form(self.cfg), background)
        if self.cfg.needs.critic:
            role: Role = "actor" if self.cfg.critic.share_backbone else "critic"
            group.rank0(TrainWorker.save, role, str(Path(path).with_name("critic")), "value_model", background)

    def models_done(self) -> bool:
        """See ModelStore."""
        return all(self.parts.models.group.all(TrainWorker.models_done))

    def finish_models(self) -> None:
        """See ModelStore."""
        self.parts.models.group.all(TrainWorker.finish_models)

    def save_state(self, folder: str, background: bool) -> None:
        """See StateStore."""
        self.parts.models.group.all(TrainWorker.save_state, folder, background)

    def save_done(self) -> bool:
        """See StateStore."""
        return all(self.parts.models.group.all(TrainWorker.save_done))

    def finish_save(self) -> dict[str, FileMark]:
        """See StateStore."""
        return {
            name: mark for marks in self.parts.models.group.all(TrainWorker.finish_save) for name, mark in marks.items()
        }

    def close(self) -> None:
        """End workers and reward processes."""
        try:
            self.parts.rewards.close()
        finally:
            workers, self._workers = self._workers, None
            if workers is not None:
                workers.close()

    def _per_gpu(self, metrics: Metrics) -> Metrics:
        """The speed as figures of several sizes of cluster are compared; a rank stands for a GPU on a CPU."""
        return {"perf/tokens_per_s_per_gpu": metrics["perf/tokens_per_s"] / self.cfg.world_size}

    def _end_profile(self, step: int) -> None:
        """Say where the time of the step went, rank by rank; the ranks have written it to files."""
        for rank, lines in enumerate(self.parts.models.group.all(TrainWorker.end_profile)):
            for line in lines:
                _log.info("profile of step %d, rank %d: %s", step, rank, line)

    def _busy_seconds(self) -> float:
        return 0.0 if self._workers is None else self._workers.busy_seconds


def saved_form(cfg: RunConfig) -> SavedForm:
    """What a run writes of its actor."""
    lora = cfg.model.lora
    if cfg.needs.reward_head:
        return "reward_model"
    return "adapter" if lora.rank and lora.save == "adapter" else "language_model"


def load_models(group: WorkerGroup, checkpoint: Checkpoint) -> list[str]:
    """The trained models of a group go on from a checkpoint; notes for a reader.

    Raises BrokenCheckpoint if a file is not as it was written: each rank looks at its share, before anything changes.
    """
    folder = str(checkpoint.path)
    faults = [fault for of_rank in group.all(TrainWorker.check_files, folder, checkpoint.marks) for fault in of_rank]
    if faults:
        raise BrokenCheckpoint(first_of(faults, 3, "; "))
    notes = [note for of_rank in group.all(TrainWorker.load_state, folder) for note in of_rank]
    return list(dict.fromkeys(notes))
