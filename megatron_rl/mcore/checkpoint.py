"""What of a Trainable is saved, as rectangles of Hugging Face tensors, and how it is put back.

Saved of each tensor that trains: its float32 master and AdamW's two means, as `param/<name>`, `exp_avg/<name>` and
`exp_avg_sq/<name>`; and the steps of optimizer and schedule. No layout is in them: any other reads its own rectangles.
A rank saves what its optimizer updates. What several ranks update alike is cut evenly among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
)
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from megatron_rl.mcore.build import Model, Trainable
from megatron_rl.mcore.convert import shards_of, tensor_shapes, trained_part
from megatron_rl.mcore.offload import Offload, synchronize
from megatron_rl.models import FAMILIES
from megatron_rl.models.rectangles import Span, even_part, padding, place_among_copies, rectangles
from megatron_rl.models.rules import LocalParam, constants
from megatron_rl.parallel.groups import dp_cp_group, expert_dp_group, expert_group, pp_group, tp_group
from megatron_rl.weights.dcp import Chunk

StateKind = Literal["param", "exp_avg", "exp_avg_sq"]
WEIGHTS: StateKind = "param"
KINDS: tuple[StateKind, ...] = (WEIGHTS, "exp_avg", "exp_avg_sq")
OPTIMIZER_STEPS, SCHEDULE_STEPS = SCALARS = ("optimizer_steps", "schedule_steps")
# Numbers of one stored rectangle: what a reader of another layout reads for the few numbers that it wants.
_MOST = 1 << 22
# Pinned memory is rounded up to a power of two, so that much is pinned at once.
_HOST_NUMBERS = 1 << 26


@dataclass(frozen=True)
class OwnedParam:
    """What this rank's optimizer updates of a parameter."""

    local: LocalParam
    owned: Span
    """flat numbers of the parameter"""
    written: Span
    """those of them that this rank saves"""
    master: torch.Tensor
    """float32 numbers of `owned`, in any shape"""
    optimizer: torch.optim.Optimizer

    def memory(self, kind: StateKind) -> torch.Tensor | None:
        """The numbers of `owned`; None before the optimizer's first step has made them."""
        return self.master if kind == WEIGHTS else self.optimizer.state[self.master].get(kind)


class SavedState:
    """The state of a Trainable as a checkpoint has it."""

    def __init__(self, trainable: Trainable, memory: Offload) -> None:
        """memory: knows where the numbers are."""
        self._trainable, self._memory = trainable, memory
        self._host: list[torch.Tensor] = []

    @cached_property
    def _owned(self) -> list[OwnedParam]:
        return list(_owned(self._trainable))

    @property
    def _written(self) -> list[OwnedParam]:
        return [param for param in self._owned if param.written[0] < param.written[1]]

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of each saved tensor, whole."""
        model = self._trainable.model
        constant = constants(model.shape, FAMILIES[model.shape.architecture])
        shapes = {
            name: size for name, size in tensor_shapes(model, trained_part(model)).items() if name not in constant
        }
        scalars = dict.fromkeys(SCALARS, ((), torch.int64))
        return {f"{kind}/{name}": (size, torch.float32) for kind in KINDS for name, size in shapes.items()} | scalars

    def snapshot(self) -> list[Chunk]:
        """A copy of what this rank saves, in host memory that the next snapshot overwrites. Nothing is moved for it.
        Scalars are in the snapshot of the first rank.
        """
        if not self._host:
            self._host = list(_host_memory(self._sizes()))
        chunks = list(self._copies(iter(self._host)))
        synchronize()
        return chunks

    def stream(self) -> Iterator[Chunk]:
        """What a snapshot has, each copied when it is asked for: host memory of one parameter. Training must wait."""
        for chunk in self._copies(torch.empty(size, dtype=torch.float32) for size in self._sizes()):
            synchronize()
            yield chunk

    def _sizes(self) -> list[int]:
        return [param.written[1] - param.written[0] for param in self._written for _ in KINDS]

    def _copies(self, memory: Iterator[torch.Tensor]) -> Iterator[Chunk]:
        """memory: for each of _sizes."""
        for param in self._written:
            for kind in KINDS:
                host, source = next(memory), param.memory(kind)
                if source is None:
                    host.zero_()
                else:
                    self._memory.read(source.detach(), param.written[0] - param.owned[0], host)
                yield from _chunks(param, kind, param.written, host)
        if torch.distributed.get_rank() == 0:
            steps = (_optimizer_steps(self._trainable), self._trainable.scheduler.num_steps)
            yield from (Chunk(name, (), torch.tensor(count)) for name, count in zip(SCALARS, steps, strict=True))

    @torch.no_grad()
    def targets(self) -> list[Chunk]:
        """Memory of what this rank's optimizer updates, to be filled; it must be on the device. Padding is made 0.
        A collective over data-parallel ranks.
        """
        # A gather of parameters that is under way would be waited for later, in place of that of `loaded`.
        self._trainable.model.complete_params()
        chunks: list[Chunk] = []
        for param in self._owned:
            for kind in KINDS:
                memory = param.memory(kind)
                if memory is None:
                    memory = param.optimizer.state[param.master][kind] = torch.zeros_like(param.master.detach())
                flat = memory.detach().view(-1)
                first, end = padding(param.local, param.owned)
                flat[first - param.owned[0] : end - param.owned[0]].zero_()
                chunks += _chunks(param, kind, param.owned, flat)
        return chunks

    @torch.no_grad()
    def loaded(self, scalars: Mapping[str, int]) -> None:
        """Follow the masters that `targets` were filled with: the model's weights, steps, learning rate. A collective
        over data-parallel ranks.
        """
        trainable, steps = self._trainable, scalars[OPTIMIZER_STEPS]
        for single in singles(trainable.optimizer):
            if single.optimizer is None:
                continue
            for group in single.optimizer.param_groups:
                group["step"] = steps
            if isinstance(single, DistributedOptimizer | Float16OptimizerWithFloat16Params):
                single._copy_main_params_to_model_params()
        if trainable.model.parallel.use_distributed_optimizer:
            for chunk in trainable.model.chunks:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
        trainable.scheduler.num_steps = 0
        trainable.scheduler.step(increment=scalars[SCHEDULE_STEPS])


def singles(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Megatron's optimizers of which `optimizer` is made: one for dense parameters, say, and one for experts."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from singles(part)
    else:
        yield optimizer


def _optimizer_steps(trainable: Trainable) -> int:
    groups = [
        group for single in singles(trainable.optimizer) if single.optimizer for group in single.optimizer.param_groups
    ]
    steps = {int(group.get("step", 0)) for group in groups}
    assert len(steps) == 1, f"all groups of parameters are updated together, yet their steps are {steps}"
    return steps.pop()


def _chunks(param: OwnedParam, kind: StateKind, span: Span, flat: torch.Tensor) -> list[Chunk]:
    """Views of `flat`, the numbers of a span, by where they are in Hugging Face tensors."""
    return [
        Chunk(f"{kind}/{one.hf_name}", one.offsets, flat[one.start - span[0] : one.end - span[0]].view(one.sizes))
        for one in rectangles(param.local, span, _MOST)
    ]


def _host_memory(sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Float32 host memory [size] of each, pinned where there is a GPU."""
    at = 0
    while at < len(sizes):
        end, total = at, 0
        while end < len(sizes) and (end == at or total + sizes[end] <= _HOST_NUMBERS):
            total, end = total + sizes[end], end + 1
        memory = torch.empty(total, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        yield from memory.split(list(sizes[at:end]))
        at = end


def _owned(trainable: Trainable) -> Iterator[OwnedParam]:
    """What this rank updates of each of its parameters, in the model's order."""
    model = trainable.model
    masters = dict(_masters(trainable.optimizer))
    output = FAMILIES[model.shape.architecture].output.megatron
    for number, chunk in enumerate(model.bare_chunks):
        params = dict(chunk.named_parameters())
        for shards in shards_of(model, pp_group().rank(), number, trained_part(model)):
            group = expert_group() if shards[0].expert else tp_group()
            param = shards[group.rank()]
            if params[param.name] not in masters:
                continue
            owned, master, optimizer = masters[params[param.name]]
            assert master.dtype == torch.float32 and master.numel() == owned[1] - owned[0], param.name
            written = even_part(owned, *_place(model, shards, group.rank()))
            if model.shape.tie_word_embeddings and param.name == output:
                # The last stage's copy of the embedding, which the first stage saves.
                written = (owned[0], owned[0])
            yield OwnedParam(param, owned, written, master, optimizer)


def _place(model: Model, shards: Sequence[LocalParam], rank: int) -> tuple[int, int]:
    """Which of the ranks that update the same numbers this one is, and how many those are."""
    index, count = place_among_copies(shards, rank)
    if model.parallel.use_distributed_optimizer:
        return index, count
    replicas = expert_dp_group() if shards[0].expert else dp_cp_group()
    return replicas.rank() * count + index, replicas.size() * count


def _masters(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, tuple[Span, torch.Tensor, torch.optim.Optimizer]]]:
    """Each parameter that this rank updates: (flat numbers of it, their float32 master, optimizer with its means)."""
    for single in singles(optimizer):
        if single.optimizer is None:  # of a rank that trains nothing
            continue
        if isinstance(single, DistributedOptimizer):
            for param, (group, order) in single.model_param_group_index_map.items():
                span = single._get_model_param_range_map(param)["param"]
                master = single.optimizer.param_groups[group]["params"][order]
                yield param, ((span.start, span.end), master, single.optimizer)
            continue
        half: dict[torch.Tensor, torch.nn.Parameter] = {}
        if isinstance(single, Float16OptimizerWithFloat16Params):
            groups = zip(single.fp32_from_float16_groups, single.float16_groups, strict=True)
            half = {master: param for masters, params in groups for master, param in zip(masters, params, strict=True)}
        for group in single.optimizer.param_groups:
            for master in group["params"]:
                param = half.get(master, master)
                yield cast(torch.nn.Parameter, param), ((0, master.numel()), master, single.optimizer)


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return tracker


def generators() -> dict[str, Any]:
    """The state of this rank's random generators: of Python, numpy, torch, its GPU, and Megatron's tracker."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": _tracker().get_states(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """The inverse of `generators`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    _tracker().set_states(dict(states["megatron"]))
