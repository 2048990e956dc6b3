"""One rank that trains: its shards of the models of a run, by role."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import MicroBatches
from megatron_rl.errors import FlowError
from megatron_rl.mcore import cpu
from megatron_rl.observe.garbage import no_collections
from megatron_rl.observe.log import quiet_libraries, setup_logging
from megatron_rl.observe.start_times import StartTimes
from megatron_rl.parallel.collectives import adder
from megatron_rl.parallel.topology import topology_of
from megatron_rl.types import Column, FileMark
from megatron_rl.workers.batch import BatchWorker
from megatron_rl.workers.objectives import Objective
from megatron_rl.workers.phases import PhaseName, RankMemory
from megatron_rl.workers.profile import StepTrace
from megatron_rl.workers.records import ModelColumn, Read, Role, SavedForm, Speed, TrainPlan, UpdateResult

if TYPE_CHECKING:
    from megatron_rl.mcore.checkpoint import SavedState
    from megatron_rl.workers.model import BaseModel, FrozenModel, TrainedModel


class TrainWorker:
    """Methods are called on all ranks at once (cluster/worker_group.py): each is a collective.

    The batch of the step is in `batch` (workers/batch.py). Every method enters the phase that it works in
    (workers/phases.py) and says no word about memory beyond that.
    """

    batch: BatchWorker

    def __init__(
        self, rank: int, world: int, cfg: RunConfig, plan: TrainPlan, memory: RankMemory | None = None
    ) -> None:
        """Join the process groups and build the models. memory: what this process shares with other workers."""
        setup_logging("policy", rank)
        quiet_libraries()
        self._rank, self._cfg, self._plan = rank, cfg, plan
        self._memory = memory or RankMemory()
        self._trace: StepTrace | None = None
        self.times = StartTimes()
        if plan.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        cpu.install()
        with self.times.phase("imports"), no_collections():
            # Megatron's modules are imported after the shim and after the environment is set.
            from megatron_rl.parallel import groups
            from megatron_rl.workers.checkpoint import StateFiles
            from megatron_rl.workers.model import BaseModel, build_frozen, build_trained
            from megatron_rl.workers.model_save import ModelFiles

        layout = plan.roles["actor"].parallel
        with self.times.phase("process groups"):
            # Later than the controller's deadline, which names the ranks that others wait for.
            groups.init_process_group(rank, world, plan.device, cfg.cluster.step_timeout_s + groups.AFTER_DEADLINE_S)
            groups.init_model_parallel(topology_of(layout, world), layout.vpp)
        device = torch.device("cpu")
        if plan.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.batch = BatchWorker(cfg, adder(groups.dp_group()), has_columns=groups.ends_pipeline())
        self._state = StateFiles(rank, world, layout)
        self._models = ModelFiles(rank, cfg)
        self.trained: dict[Role, TrainedModel] = {}
        self.frozen: dict[Role, FrozenModel | BaseModel] = {}
        for role, of_role in plan.roles.items():
            if of_role.base_of is not None:
                self.frozen[role] = BaseModel(self.trained[of_role.base_of])
                continue
            if of_role.training is None:
                self.frozen[role] = build_frozen(of_role, cfg, device, self.times)
                continue
            self.trained[role] = build_trained(of_role, cfg, device, self.times)
            self._memory.add_model(role, self.trained[role].memory)
            # The next model, or an engine, is built in the memory that this one gives up.
            self._memory.enter("between")

    def start_seconds(self) -> dict[str, float]:
        """What building this rank's worker took: phase -> seconds. No collective."""
        return self.times.seconds

    def enter(self, phase: PhaseName, role: Role | None = None) -> None:
        """Bring the memory of this process where the phase has it."""
        self._memory.enter(phase, role)

    def forward(self, micros: MicroBatches, role: Role, read: Read, into: Mapping[ModelColumn, Column]) -> None:
        """One pass of a role's model over sequences of the batch, which micro-batches name by number.

        into: {what `read` asks for: the column of the batch that it is written to}.
        """
        model = self.trained.get(role) or self.frozen.get(role)
        if model is None:
            raise self._no_role(role)
        replay = self._cfg.actor.router_replay if role == "actor" else "off"
        # A model without memory of its own is in that of the role whose adapters it leaves out.
        self.enter("forward", self._plan.roles[role].base_of or role)
        if replay == "old" and "old_logprobs" in into.values():
            found, routed = self._trained(role).forward_recording(read, self.batch.micros(micros))
            self.batch.write_routed(micros, routed)
        else:
            found = model.forward(read, self.batch.micros(micros, replay=replay == "rollout"))
        self.enter("between")
        for name, column in into.items():
            self.batch.write(column, micros, [of_micro[name] for of_micro in found])

    def step(
        self,
        micros: MicroBatches,
        role: Role,
        objective: Objective,
        columns: Mapping[str, Column],
        into: Column | None = None,
    ) -> UpdateResult:
        """One optimizer step of a role's model over the micro-batches of all ranks.

        columns: {what the loss calls a column: the column of the batch}. into: the column that keeps what the step
        started from, log-probabilities or values by its objective.
        """
        model = self._trained(role)
        self.enter("update", role)
        actor = self._cfg.actor
        replay, balance_coef = role == "actor" and actor.router_replay != "off", actor.router_aux_loss_coef
        batches = self.batch.micros(micros, columns, replay=replay)
        begun = time.perf_counter()
        report, found = model.step(objective, batches, balance_coef if role == "actor" else 0.0)
        # The report's numbers have been read from the device: its work is done.
        speed = Speed(model.flops(batches), time.perf_counter() - begun)
        self.enter("between")
        if into is not None:
            self.batch.write(into, micros, found)
        return UpdateResult(report, model.memory.take(), speed=speed)

    def begin_profile(self, step: int) -> None:
        """Trace what this process does from now on, if its rank is one of trainer.profile.ranks."""
        trainer = self._cfg.trainer
        if self._rank in trainer.profile.ranks:
            self._memory.trace = self._trace = StepTrace(Path(trainer.run_dir) / "profile", step, self._rank)

    def end_profile(self) -> list[str]:
        """Write the trace of the step, and its table; the table's lines, none on ranks that are not traced."""
        trace, self._trace, self._memory.trace = self._trace, None, None
        return [] if trace is None else trace.end()

    def bound_layers(self, role: Role) -> list[str]:
        """Hugging Face's names of the layers that have an adapter on this rank."""
        from megatron_rl.mcore.lora import bound_layers

        return bound_layers(self._trained(role).model)

    def save(self, role: Role, path: str, form: SavedForm = "language_model", background: bool = False) -> str:
        """A role's model as a Hugging Face folder at `path`, or its adapters as PEFT's. Each rank writes files of what
        it has, and the first one makes them a model. In the background: return once host memory has a copy (the bytes
        of the files that the rank writes). The folder is there, and errors come, when finish_models is called.

        Weights that are not finite are not saved: NonFiniteError on all ranks, and an earlier save stays as it is.
        CheckpointError on all ranks if a rank cannot write.
        """
        model = self._trained(role)
        self.enter("save", role)
        model.refuse_bad_weights(
            f"the {role}'s weights", f"{path} is not written; an earlier save there is intact", math.inf
        )
        self._models.begin(model, Path(path), self._plan.roles[role], form, background)
        self.enter("between")
        if not background:
            self._models.finish()
        return path

    def models_done(self) -> bool:
        """Whether finish_models would not wait for this rank's files. No collective."""
        return self._models.is_done

    def finish_models(self) -> None:
        """Wait for the models that are being saved, and give their folders their names. CheckpointError on all ranks if
        a rank could not write one: it is not there then, and an earlier save stays.
        """
        self._models.finish()

    def save_state(self, folder: str, background: bool) -> None:
        """Begin a checkpoint of all trained models and of this rank's random generators. In the background: copy its
        share to host memory (12 bytes a number), and have a thread write it to `folder` while training goes on. Else it
        is written when this returns. An error comes out of finish_save, which must be called before the next save.
        """
        # No phase: a snapshot is read from where the memory is, and nothing is moved for it.
        self._state.begin(Path(folder), self._saved(), background)

    def save_done(self) -> bool:
        """Whether finish_save would not wait for this rank's writer. No collective."""
        return self._state.is_done

    def finish_save(self) -> dict[str, FileMark]:
        """Wait until the checkpoint that was begun is written: relative name of each file that this rank has written ->
        its mark. CheckpointError on all ranks if a rank could not write. Empty if none was begun.
        """
        return self._state.finish()

    def check_files(self, folder: str, marks: Mapping[str, FileMark]) -> list[str]:
        """What is wrong with this rank's share of a checkpoint's files; each is read once over all ranks."""
        return self._state.faults(Path(folder), marks)

    def load_state(self, folder: str) -> list[str]:
        """All trained models as a checkpoint has them: weights, masters, moments, steps, learning rate; and the random
        generators, if the layout is the same. Returns notes for a reader.

        CheckpointError on all ranks, before anything is changed, if the tensors are not those of the models.
        """
        notes = self._state.load(Path(folder), self._saved(), lambda role: self.enter("load", role))
        self.enter("between")
        for model in self.trained.values():
            model.changed = True
        return notes

    def _saved(self) -> dict[Role, SavedState]:
        return {role: model.saved for role, model in self.trained.items()}

    def _trained(self, role: Role) -> TrainedModel:
        if role not in self.trained:
            raise self._no_role(role)
        return self.trained[role]

    def _no_role(self, role: Role) -> FlowError:
        roles = {**dict.fromkeys(self.trained, "trained"), **dict.fromkeys(self.frozen, "frozen")}
        shown = ", ".join(f"{name} ({kind})" for name, kind in roles.items())
        return FlowError(f"no model of this run is a {role} that can do this; it has: {shown}")

    def close(self) -> None:
        """Finish the saves that are under way, and leave the process groups."""
        from megatron_rl.parallel import groups

        try:
            self._models.finish()
        finally:
            groups.destroy()
