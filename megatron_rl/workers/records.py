"""What travels between the controller and the ranks: plans of what to build, what to read, results of a step."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron_rl.config.run import TrainingConfig
from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.models.config_json import HeadKind
from megatron_rl.models.flops import peak_of
from megatron_rl.models.lora import Adapters
from megatron_rl.models.shape import ModelShape
from megatron_rl.types import OffloadReport, StepReport

Role = Literal["actor", "critic", "reference"]
"""What a model is for in a run; a TrainWorker holds its models by role."""
SavedForm = Literal["language_model", "value_model", "reward_model", "adapter"]
"""value_model: a token classifier with one label, which is what a critic is to transformers. reward_model: a sequence
classifier with one label. adapter: what PEFT loads beside the model; a language_model has its adapters merged in."""
ModelColumn = Literal["logprobs", "entropy", "greedy", "values"]
"""What a forward pass can give of each token (mcore.heads.READERS)."""


@dataclass(frozen=True)
class RolePlan:
    """How the model of one role is built; made on the controller, so that all ranks agree."""

    shape: ModelShape
    parallel: ParallelConfig
    weights: str
    """Folder that the weights come from, and the files that stand beside them in a save."""
    random: bool = False
    """Draw the weights; the folder gives the config alone."""
    changes: Mapping[str, object] = field(default_factory=dict[str, object])
    """Entries laid over the folder's config.json, here and in a save."""
    lm_head: bool = True
    value_head: bool = False
    head_biased: bool = True
    stored_head: HeadKind = "causal"
    """What the folder has after the transformer."""
    training: TrainingConfig | None = None
    """How the model trains; None for a frozen one."""
    optimizer_steps: int = 1
    """Steps of the whole run, for the decay of the learning rate."""
    offloaded: tuple[str, ...] = ()
    """What of it leaves the device when a phase says so: params, grads, optimizer."""
    adapters: Adapters | None = None
    """What is trained beside the weights, and not these."""
    adapters_from: str | None = None
    """Folder of the adapters to begin from; None begins with new ones."""
    base_of: Role | None = None
    """The model is that of this role with its adapters switched off, and has no memory of its own."""


@dataclass(frozen=True)
class TrainPlan:
    """What a TrainWorker is built from beside the config."""

    device: str
    roles: Mapping[Role, RolePlan]
    """In the order in which they are built. All have the actor's layout."""


@dataclass(frozen=True)
class EnginePlan:
    """What an EngineWorker is built from beside the config. order: the rank of each engine slot; slot s is
    tensor-parallel rank s % tp of engine s // tp.
    """

    order: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """What a forward pass brings back: these columns and no others. temperature: of the softmax over the logits."""

    columns: tuple[ModelColumn, ...]
    temperature: float = 1.0


def peak_memory() -> int:
    """Most bytes that this process has held: of its device, or of the machine's memory where it computes on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def peak_flops() -> float | None:
    """Operations a second that this rank's device is made for (models/flops.py); None on a CPU or an unknown device."""
    return peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Speed:
    """What a rank computed, and in which time."""

    flops: float
    """its part of the model's floating-point operations (models/flops.py)"""
    seconds: float
    peak: float | None = field(default_factory=peak_flops)
    """see peak_flops"""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step, as this rank saw it."""

    report: StepReport
    offload: OffloadReport = field(default_factory=OffloadReport)
    """what it moved since the step before"""
    memory_bytes: int = field(default_factory=peak_memory)
    """the most that it has held, see peak_memory"""
    speed: Speed | None = None
