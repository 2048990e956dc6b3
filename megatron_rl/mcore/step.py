"""Forward passes and optimizer steps over packed micro-batches, under Megatron's pipeline schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.mcore.build import Model, Trainable
from megatron_rl.mcore.finite import bad_gradients, bad_losses
from megatron_rl.mcore.heads import Reader
from megatron_rl.mcore.objectives import HiddenLoss
from megatron_rl.mcore.packing import MicroBatch, pack
from megatron_rl.mcore.routing import Routing, balance_gradient, recorded, router_metrics, router_sums
from megatron_rl.observe.beat import beat
from megatron_rl.parallel.collectives import any_rank, reduce_metrics
from megatron_rl.parallel.groups import cp_group, dp_cp_group, tp_group
from megatron_rl.types import Metric, StepReport, TrainBatch

T = TypeVar("T")
Loss = tuple[torch.Tensor, torch.Tensor, T]
"""(loss, number of tokens, what the schedule collects): as Megatron wants it of a micro-batch"""


def pack_all(model: Model, batches: Sequence[TrainBatch]) -> list[MicroBatch]:
    """Micro-batches on the model's device, padded as sequence parallelism needs."""
    parallel, shape = model.parallel, model.shape
    split = parallel.tp if parallel.sequence_parallel else 1
    context = cp_group()
    return [
        pack(
            batch,
            rotary_dim=shape.rotary_dim,
            rotations=[shape.rotation(layer) for layer in range(shape.num_layers)],
            windows=shape.windows,
            vocab_size=shape.vocab_size,
            device=model.device,
            split=split,
            cp=parallel.cp,
            cp_rank=context.rank(),
            kv_group=context if parallel.cp > 1 else None,
            uniform=not parallel.packing,
            experts=shape.num_experts,
            split_rank=tp_group().rank() if split > 1 else 0,
        )
        for batch in batches
    ]


@dataclass(frozen=True)
class _MicroOutcome:
    """What an objective made of one micro-batch, still on the device: reading a number stalls it."""

    sums: dict[str, torch.Tensor]
    """metric -> its sum over the trained tokens here, the weighted loss among them"""
    counts: dict[str, float]
    column: torch.Tensor
    """[n] what the objective hands back"""
    weighted: torch.Tensor
    """[n] weighted token losses"""


def _forward(chunk: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
    return chunk(
        input_ids=micro.tokens,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=micro.packed,
    )


def _run(
    model: Model,
    micros: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch, torch.Tensor], Loss[T]],
    forward_only: bool,
) -> list[T]:
    """Drive all micro-batches through the schedule; returns what loss_of made of each (last stage only)."""

    begun = 0

    def step(
        iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss[T]]]:
        nonlocal begun
        begun += 1
        beat(f"micro-batch {begun} of {len(micros) * len(model.chunks)}")
        micro = next(iterator)
        return _forward(chunk, micro), lambda hidden: loss_of(micro, hidden)

    outcomes: list[T] = get_forward_backward_func()(
        forward_step_func=step,
        # Each chunk of an interleaved schedule walks through the micro-batches by itself.
        data_iterator=[iter(micros) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(micros),
        seq_length=max(micro.tokens.shape[1] for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return outcomes


@dataclass(frozen=True)
class Forwarded:
    """What a forward pass gave of each micro-batch."""

    columns: list[dict[str, torch.Tensor]]
    """[T] float32 columns on the CPU, 0 if loss_mask is False; empty on other pipeline stages than the last"""
    routed: list[torch.Tensor]
    """[T, layers, k] what this stage's routers chose (routing.recorded); empty where it was not asked for"""


def forward_columns(model: Model, batches: Sequence[TrainBatch], read: Reader) -> list[dict[str, torch.Tensor]]:
    """The columns of `forward`."""
    return forward(model, batches, read).columns


@torch.no_grad()
def forward(model: Model, batches: Sequence[TrainBatch], read: Reader, *, records: bool = False) -> Forwarded:
    """What `read` gives of each micro-batch.

    batches: this data-parallel rank's micro-batches. records: what routers choose, too.
    """

    def loss_of(micro: MicroBatch, hidden: torch.Tensor) -> Loss[dict[str, torch.Tensor]]:
        zero = hidden.new_zeros((), dtype=torch.float32)
        return zero, torch.zeros((), dtype=torch.int), read(micro, hidden)

    for chunk in model.chunks:
        chunk.eval()
    micros = pack_all(model, batches)
    for routing in _routings(micros):
        routing.records = records
    outcomes = _run(model, micros, loss_of, forward_only=True)
    names = list(outcomes[0]) if outcomes else []
    columns = [_columns(micros, [values[name] for values in outcomes]) for name in names]
    routed: list[torch.Tensor] = []
    if records:
        parts = [cp_group(), *([tp_group()] if model.config.sequence_parallel else [])]
        groups = [group for group in parts if group.size() > 1]
        routed = recorded(_routings(micros), [batch.num_tokens for batch in batches], model.shape.num_layers, groups)
    return Forwarded([dict(zip(names, of_micro, strict=True)) for of_micro in zip(*columns, strict=True)], routed)


def _routings(micros: Sequence[MicroBatch]) -> list[Routing]:
    """Of each micro-batch; empty for a model without experts."""
    return [micro.packed.routing for micro in micros if micro.packed.routing is not None]


@torch.no_grad()
def _count_for_balance(model: Model, micros: Sequence[MicroBatch], coef: float) -> None:
    """Tell routers the balancing loss's gradient, from a pass that counts the tokens of each expert (routing.py)."""
    nothing = torch.zeros((), dtype=torch.int)
    _run(model, micros, lambda micro, hidden: (hidden.new_zeros(()), nothing, None), forward_only=True)
    sums = router_sums(_routings(micros), model.shape.num_layers)
    assert sums is not None, "the balancing loss is of models with experts"
    push = balance_gradient(sums, coef).to(model.device)
    for routing in _routings(micros):
        routing.push = push
        routing.sums.clear()


def _columns(micros: Sequence[MicroBatch], values_of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Values [n] at the tokens that this rank predicts -> [T] float32 columns on the CPU, whole on every rank."""
    if not values_of:
        return []
    columns = []
    for micro, values in zip(micros, values_of, strict=True):
        column = torch.zeros(micro.num_tokens, dtype=torch.float32, device=values.device)
        columns.append(column.index_put_((micro.trained.to(values.device),), values.float()))
    group = cp_group()
    if group.size() > 1:
        # Each rank of the context has its own tokens and zeros elsewhere. All have the same micro-batches, so all come.
        whole = torch.cat(columns)
        torch.distributed.all_reduce(whole, group=group)
        columns = list(whole.split([micro.num_tokens for micro in micros]))
    return [column.cpu() for column in columns]


def _add(outcomes: Sequence[_MicroOutcome]) -> dict[str, Metric]:
    """Sums and counts of all micro-batches of this rank."""
    names = list(outcomes[0].sums)
    by_micro = [torch.stack([outcome.sums[name].float() for name in names]) for outcome in outcomes]
    sums = torch.stack(by_micro).double().sum(0)
    return {
        name: Metric(total, sum(outcome.counts[name] for outcome in outcomes))
        for name, total in zip(names, sums.tolist(), strict=True)
    }


def optimizer_step(
    trainable: Trainable, batches: Sequence[TrainBatch], objective: HiddenLoss, balance_coef: float = 0.0
) -> tuple[StepReport, list[torch.Tensor]]:
    """One optimizer step over the global mini-batch; this rank holds `batches`, one per micro-batch.

    The loss is sum(loss_weights * losses) over all tokens of all ranks. The column loss_weights holds global
    denominators, so neither the split into micro-batches nor the number of ranks changes the gradient. balance_coef: of
    the routers' balancing loss (routing.py), which the report's loss does not hold.
    Where the loss or the norm of the gradient is not finite, nothing is changed, on no rank: not the weights, not the
    optimizer's moments, not the learning-rate schedule; the report says so, and where it came from.
    Returns the report and, per micro-batch, the [T] column that the objective handed back; both come from the last
    pipeline stage (elsewhere the report has no metrics, a loss of NaN, and the list is empty).
    """
    model = trainable.model
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()  # type: ignore[operator]
    trainable.optimizer.zero_grad()

    def loss_of(micro: MicroBatch, hidden: torch.Tensor) -> Loss[_MicroOutcome]:
        losses, values, column = objective(micro, hidden)
        weighted = micro.columns["loss_weights"] * losses
        loss = weighted.sum()
        sums = {"loss": loss, **{name: value.sum() for name, value in values.items()}}
        counts = {"loss": 1.0, **{name: float(value.numel()) for name, value in values.items()}}
        detached = {name: value.detach().clone() for name, value in sums.items()}
        outcome = _MicroOutcome(detached, counts, column.detach(), weighted.detach())
        return loss, torch.ones((), dtype=torch.int), outcome

    micros = pack_all(model, batches)
    if balance_coef:
        _count_for_balance(model, micros, balance_coef)
    outcomes = _run(model, micros, loss_of, forward_only=False)
    beat("the last micro-batch")
    sums = router_sums(_routings(micros), model.shape.num_layers)
    report = StepReport(loss=float("nan"), grad_norm=_gradient_norm(trainable.optimizer), lr=0.0)
    if outcomes:
        total = reduce_metrics(_add(outcomes), dp_cp_group())
        report = replace(
            report, loss=total.pop("loss").total, metrics=total if sums is None else total | router_metrics(sums)
        )
    # The loss is known to the last stage alone, and the norm to the ranks that share an optimizer.
    wrong = not math.isfinite(report.grad_norm) or (bool(outcomes) and not math.isfinite(report.loss))
    # Asked on every rank: one that skipped the update alone would leave the others in the optimizer's collectives.
    if any_rank(wrong):
        bad = bad_losses(micros, [outcome.weighted for outcome in outcomes]) or bad_gradients(
            model, micros, lambda some: _run(model, some, loss_of, forward_only=False)
        )
        report = replace(report, updated=False, bad=tuple(bad))
    else:
        beat("the gradient's norm")
        trainable.scheduler.step(increment=1)
        _apply_gradient(trainable.optimizer, report.grad_norm)
    report = replace(report, lr=trainable.optimizer.param_groups[0]["lr"])
    return report, _columns(micros, [outcome.column for outcome in outcomes])


def _gradient_norm(optimizer: MegatronOptimizer) -> float:
    """The norm of the whole gradient, which is ready to be clipped and applied after this."""
    # Megatron's own look at gradients is for float16 alone.
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm() or 0.0)


def _apply_gradient(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clip and update: what Megatron's step does once it has the norm."""
    for single in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        # None on a rank that trains nothing.
        params: list[torch.Tensor] = [] if single.optimizer is None else [*single.get_parameters()]
        if params:
            clip_grad_by_total_norm_fp32(params, max_norm=single.config.clip_grad, total_norm=norm)
    updated = optimizer.step_with_ready_grads()
    assert updated, "an optimizer without a loss scaler takes every step"
