"""A model on one rank with what it needs to train or to be read: actor, critic, reference and reward model alike.

Imported on ranks alone: Megatron comes in with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from megatron_rl.config.run import RunConfig
from megatron_rl.mcore.build import Model, Trainable, build_model, make_trainable
from megatron_rl.mcore.checkpoint import SavedState
from megatron_rl.mcore.convert import export_hf, lm_head_shapes, load_hf
from megatron_rl.mcore.finite import refuse_bad_weights
from megatron_rl.mcore.heads import columns_reader
from megatron_rl.mcore.lora import attach, merged_values, without_adapters
from megatron_rl.mcore.offload import Offload
from megatron_rl.mcore.save_plan import SavePlan
from megatron_rl.mcore.saving import save_plan, saved_tensors
from megatron_rl.mcore.step import forward, forward_columns, optimizer_step
from megatron_rl.models import FAMILIES
from megatron_rl.models.flops import training_flops
from megatron_rl.observe.start_times import StartTimes
from megatron_rl.types import StepReport, TrainBatch
from megatron_rl.weights.heads import VALUE_HEAD, ValueHeadSource
from megatron_rl.weights.peft_files import AdapterFile, NewAdapters
from megatron_rl.weights.safetensors import RandomSource, SafetensorsSource, WeightSource
from megatron_rl.weights.shard_files import TensorEntry
from megatron_rl.workers.objectives import Objective
from megatron_rl.workers.records import Read, RolePlan, SavedForm


def load_model(plan: RolePlan, cfg: RunConfig, device: torch.device, times: StartTimes) -> Model:
    """The model of a plan on this rank, its weights read or drawn. Raises CheckpointError as mcore.convert.load_hf."""
    with times.phase("model"):
        model = build_model(
            plan.shape,
            plan.parallel,
            cfg.model.dtype,
            device,
            lm_head=plan.lm_head,
            value_head=plan.value_head,
            head_biased=plan.head_biased,
        )

    def open_source() -> WeightSource:
        source: WeightSource
        if plan.random:
            centered = FAMILIES[plan.shape.architecture].compute.zero_centered_norms
            source = RandomSource(cfg.trainer.seed, plan.shape.initializer_range, 0.0 if centered else 1.0)
        else:
            source = SafetensorsSource(plan.weights)
        if plan.value_head:
            unused = lm_head_shapes(plan.shape) if plan.stored_head == "causal" and not plan.lm_head else {}
            source = ValueHeadSource(source, plan.stored_head, unused)
        return source

    with times.phase("weights"):
        load_hf(model, open_source)
        if plan.adapters is None:
            return model
        model = attach(model, plan.adapters, cfg.trainer.seed)
        folder = plan.adapters_from
        load_hf(model, lambda: NewAdapters(cfg.trainer.seed) if folder is None else AdapterFile(folder), "adapters")
    return model


def read_columns(model: Model, read: Read, micros: Sequence[TrainBatch]) -> list[dict[str, torch.Tensor]]:
    """Per micro-batch the columns asked for, [T] float32 on the CPU; an empty list off the last pipeline stage."""
    return forward_columns(model, micros, columns_reader(model, read.columns, read.temperature))


def build_frozen(plan: RolePlan, cfg: RunConfig, device: torch.device, times: StartTimes) -> FrozenModel:
    """The model of a plan without training; errors as load_model."""
    return FrozenModel(load_model(plan, cfg, device, times))


def build_trained(plan: RolePlan, cfg: RunConfig, device: torch.device, times: StartTimes) -> TrainedModel:
    """The model of a plan with training, wrapped for it; errors as load_model."""
    assert plan.training is not None, "a frozen model's plan"
    model = load_model(plan, cfg, device, times)
    with times.phase("optimizer"):
        return TrainedModel(make_trainable(model, plan.training.optim, plan.optimizer_steps), plan.offloaded)


class FrozenModel:
    """A model that is only read."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def forward(self, read: Read, micros: Sequence[TrainBatch]) -> list[dict[str, torch.Tensor]]:
        """See read_columns. A collective over the ranks that share the model."""
        return read_columns(self.model, read, micros)


class BaseModel:
    """A trained model with its adapters switched off: what they were added to."""

    def __init__(self, trained: TrainedModel) -> None:
        self.model = trained.model

    def forward(self, read: Read, micros: Sequence[TrainBatch]) -> list[dict[str, torch.Tensor]]:
        """See read_columns. A collective over the ranks that share the model."""
        with without_adapters(self.model):
            return read_columns(self.model, read, micros)


class TrainedModel:
    """A model with its optimizer, its learning-rate schedule and its memory."""

    def __init__(self, trainable: Trainable, offloaded: Collection[str] = ()) -> None:
        """offloaded: what phases may move to the host: params, grads, optimizer."""
        self.trainable = trainable
        # Each update zeroes the gradients first, so their values need not be kept.
        self.memory = Offload(trainable, offloaded, keep_grads=False)
        self.saved = SavedState(trainable, self.memory)
        """What a checkpoint has of it."""
        self.changed = True
        """Whether the weights differ from those published last; None were at first."""

    @property
    def model(self) -> Model:
        """The model as its optimizer holds it."""
        return self.trainable.model

    def forward(self, read: Read, micros: Sequence[TrainBatch]) -> list[dict[str, torch.Tensor]]:
        """See read_columns. A collective over all ranks."""
        return read_columns(self.model, read, micros)

    def forward_recording(
        self, read: Read, micros: Sequence[TrainBatch]
    ) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
        """As `forward`, and the experts that this rank's layers chose, [T, layers, k] of each micro-batch."""
        found = forward(self.model, micros, columns_reader(self.model, read.columns, read.temperature), records=True)
        return found.columns, found.routed

    def step(
        self, objective: Objective, micros: Sequence[TrainBatch], balance_coef: float = 0.0
    ) -> tuple[StepReport, list[torch.Tensor]]:
        """One optimizer step (mcore.step.optimizer_step). A collective over all ranks."""
        report, column = optimizer_step(self.trainable, micros, objective.on(self.model), balance_coef)
        self.changed |= report.updated
        return report, column

    def flops(self, micros: Sequence[TrainBatch]) -> float:
        """This rank's part of the operations of a step over its data-parallel rank's micro-batches."""
        shape, parallel = self.model.shape, self.model.parallel
        lengths = [length for batch in micros for length in batch.seq_lens]
        predicted = sum(int(batch.loss_mask.sum()) for batch in micros) if self.model.lm_head else 0
        frozen = self.model.adapters is not None
        whole = training_flops(shape, FAMILIES[shape.architecture], lengths, predicted, frozen=frozen)
        return whole / (parallel.tp * parallel.pp * parallel.cp)

    def export(
        self, form: SavedForm = "language_model", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in Hugging Face names, without the head that the form does not have, and with adapters merged
        in; or the adapters alone. A collective over all ranks; see mcore.convert.export_hf.
        """
        if form == "adapter":
            return export_hf(self.model, dtype, part="adapters")
        dropped = self._dropped(form)
        tensors = export_hf(self.model, dtype, merged_values(self.model))
        return ((name, tensor) for name, tensor in tensors if name not in dropped)

    def save_plan(self, form: SavedForm, shard_bytes: int) -> SavePlan:
        """Which rank writes which tensors of a whole model into which file; the same on all ranks."""
        return save_plan(self.model, self._dropped(form), shard_bytes)

    def saved_tensors(self, plan: SavePlan, timeout_s: float) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """The tensors that this rank writes, with adapters merged in. A collective; see mcore.saving.saved_tensors."""
        return saved_tensors(self.model, plan, merged_values(self.model), timeout_s)

    def _dropped(self, form: SavedForm) -> frozenset[str]:
        """The head that the form does not have."""
        return frozenset(VALUE_HEAD if form == "language_model" else lm_head_shapes(self.model.shape))

    def adapters(self) -> dict[str, torch.Tensor]:
        """The adapters, whole, by Hugging Face's names, on every rank; empty if there are none. As export."""
        return dict(self.export("adapter")) if self.model.adapters is not None else {}

    def refuse_bad_weights(self, what: str, consequence: str, limit: float) -> None:
        """See mcore.finite.refuse_bad_weights; the weights must be on the device."""
        refuse_bad_weights(self.model, what=what, consequence=consequence, limit=limit)
