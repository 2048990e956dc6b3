"""One rank's part of saved models: tensors are copied to host memory, and a thread writes them beside training.

Every rank writes files of its own into one folder (mcore/save_plan.py). The first rank makes them a model and moves the
folder to its name, once all have written. The thread makes no collective calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import CheckpointError, MegatronRLError
from megatron_rl.mcore.save_plan import SavePlan
from megatron_rl.observe.beat import beat, threads_count
from megatron_rl.parallel.collectives import gathered
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.weights.heads import sequence_classifier_config, token_classifier_config
from megatron_rl.weights.marked_files import sync_folder
from megatron_rl.weights.model_folder import Beside, cleared, complete, staging_of, unwritten
from megatron_rl.weights.peft_files import write_adapter
from megatron_rl.weights.shard_files import Files, TensorEntry, write_files
from megatron_rl.workers.checkpoint import in_background, refuse
from megatron_rl.workers.model import TrainedModel
from megatron_rl.workers.records import RolePlan, SavedForm
from megatron_rl.workers.saved import check_saved, run_renderer


class ShardThread:
    """Writes a rank's files while the rank brings the next tensors together."""

    def __init__(self, folder: Path, files: Files, max_bytes: int | None = None) -> None:
        """max_bytes: of tensors that wait in host memory; `put` waits for the disk beyond that. It must be as large as
        any of the files. None sets no bound but that of all files.
        """
        self._max_bytes = max_bytes
        self._queue: deque[tuple[TensorEntry, torch.Tensor]] = deque()
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._is_sealed = False
        self.written: Future[None] = in_background(lambda: self._write(folder, files), "model-save")
        """Done when all files are on the disk; or it has the error."""
        self.written.add_done_callback(lambda _: self._notify())

    def put(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Have a tensor written, whose memory is no one else's. Nothing is kept after an error."""
        copy = tensor.cpu()
        with self._changed:
            while self._is_full(entry.num_bytes) and not self.written.done():
                beat(f"wait for the disk before {entry.name}")
                self._changed.wait(1.0)
            if not self.written.done():
                self._queue.append((entry, copy))
                self._pending_bytes += entry.num_bytes
                self._changed.notify_all()

    def seal(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._is_sealed = True
            self._changed.notify_all()

    def _is_full(self, further_bytes: int) -> bool:
        if self._max_bytes is None or not self._pending_bytes:
            return False
        return self._pending_bytes + further_bytes > self._max_bytes

    def _notify(self) -> None:
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def _write(self, folder: Path, files: Files) -> None:
        write_files(folder, files, self._next)
        if files:
            sync_folder(folder)

    def _next(self, entry: TensorEntry) -> torch.Tensor:
        with self._changed:
            while True:
                for number, (one, tensor) in enumerate(self._queue):
                    if one == entry:
                        del self._queue[number]
                        self._pending_bytes -= one.num_bytes
                        self._changed.notify_all()
                        return tensor
                if self._is_sealed:
                    raise CheckpointError(f"{entry.name} did not come")
                self._changed.wait()


@dataclass(frozen=True)
class _UnderWay:
    """A save whose files are being written. written: this rank's. complete: what the first rank does once all have
    written, with the errors of ranks; it gives the faults of the save.
    """

    path: Path
    written: Future[None]
    complete: Callable[[list[str]], list[str]]


class ModelFiles:
    """This rank's part of the models that a run saves."""

    def __init__(self, rank: int, cfg: RunConfig) -> None:
        self._rank, self._cfg = rank, cfg
        self._under_way: list[_UnderWay] = []

    def begin(self, model: TrainedModel, path: Path, plan: RolePlan, form: SavedForm, background: bool) -> None:
        """Save a model at `path`. background: return as soon as host memory has a copy of what this rank writes. Else
        at most the bytes of one file wait there. An error comes out of `finish`. A collective over all ranks; raises
        CheckpointError on all of them if the folder cannot be made.
        """
        begin = self._begin_adapter if form == "adapter" else self._begin_model
        self._under_way.append(begin(model, path, plan, form, background))

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait for this rank's threads."""
        return all(one.written.done() for one in self._under_way)

    def finish(self) -> None:
        """Wait for the files of all saves that are begun, and give the folders their names. A collective. Raises
        CheckpointError on all ranks, with the error of each; an earlier save in such a folder stays as it is.
        """
        saves, self._under_way = self._under_way, []
        if not saves:
            # The same on all ranks: one that closes does not wait for others then.
            return
        faults: list[str] = []
        for one in saves:
            own: list[str] = []
            try:
                with threads_count():
                    one.written.result()
            except CheckpointError as error:
                own.append(f"rank {self._rank}: {error}")
            of_ranks = [fault for of_rank in gathered(own) for fault in of_rank]
            faults += one.complete(of_ranks) if self._rank == 0 else []
        refuse(faults)

    def _begin_adapter(
        self, model: TrainedModel, path: Path, plan: RolePlan, form: SavedForm, background: bool
    ) -> _UnderWay:
        """Adapters are small: each rank has all of them, and the first one writes."""
        adapters = plan.adapters
        assert adapters is not None
        tensors = [(name, tensor.cpu()) for name, tensor in model.export(form)]
        work = (lambda: write_adapter(path, tensors, adapters, plan.weights)) if self._rank == 0 else _nothing
        return _UnderWay(path, in_background(work, "model-save"), lambda faults: faults)

    def _begin_model(
        self, model: TrainedModel, path: Path, plan: RolePlan, form: SavedForm, background: bool
    ) -> _UnderWay:
        size = int(self._cfg.trainer.save_shard_gb * 1e9)
        pieces = model.save_plan(form, size)
        first = gathered([str(staging_of(path))] if self._rank == 0 else [])
        staging = Path(next(name for of_rank in first for name in of_rank))
        refuse(_made(path, staging) if self._rank == 0 else [])
        thread = ShardThread(staging, pieces.files.get(self._rank, {}), None if background else size)
        try:
            for entry, tensor in model.saved_tensors(pieces, self._cfg.cluster.step_timeout_s):
                thread.put(entry, tensor)
        finally:
            thread.seal()
        return _UnderWay(
            path,
            thread.written,
            lambda faults: _completed(path, staging, pieces, faults, lambda: _beside(plan, form, self._cfg)),
        )


def _nothing() -> None:
    """The work of a rank that writes nothing."""


def _made(path: Path, staging: Path) -> list[str]:
    """Make the folder that all ranks write into; why it cannot be made."""
    try:
        with cleared(path, staging):
            staging.mkdir(parents=True)
    except CheckpointError as error:
        return [str(error)]
    return []


def _completed(path: Path, staging: Path, plan: SavePlan, faults: list[str], beside: Callable[[], Beside]) -> list[str]:
    """Make the files of all ranks a model at `path`; why that cannot be. faults: of the ranks."""
    try:
        with cleared(path, staging):
            if faults:
                raise unwritten(path, "; ".join(faults))
            complete(path, staging, plan.all_files, beside())
            sync_folder(path.parent)
    except MegatronRLError as error:
        return [str(error)]
    return []


def _beside(plan: RolePlan, form: SavedForm, cfg: RunConfig) -> Beside:
    """What stands beside the weights, and a look at it as the run reads it."""
    model, renderer = cfg.model, run_renderer(cfg, plan.weights)
    head = token_classifier_config(plan.shape) if form == "value_model" else {}
    if form == "reward_model":
        head = sequence_classifier_config(plan.shape, renderer.pad_id_apart())
    return Beside(
        Path(plan.weights),
        Path(model.tokenizer_path or model.path),
        dtype=DTYPES[model.dtype],
        config_changes={**plan.changes, **head},
        eos_token=model.eos_token,
        chat_template=renderer.saved_template(),
        verify=lambda folder: check_saved(folder, renderer, cfg),
    )
