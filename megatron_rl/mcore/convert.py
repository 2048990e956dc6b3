"""Hugging Face weights into a Megatron model and out again, block by block (the table is weights/spec.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_rl.config.layout import ModelShape
from megatron_rl.errors import CheckpointError
from megatron_rl.mcore.build import Policy
from megatron_rl.parallel.groups import tp_group
from megatron_rl.weights import FAMILIES
from megatron_rl.weights.safetensors import WeightSource
from megatron_rl.weights.spec import LocalParam, hf_shapes, megatron_params


def local_params(shape: ModelShape, tp: int, tp_rank: int) -> list[LocalParam]:
    """The parameters of tensor-parallel rank `tp_rank`, in HF order."""
    return list(
        megatron_params(
            shape,
            FAMILIES[shape.architecture],
            tp=tp,
            tp_rank=tp_rank,
            layers=range(shape.num_layers),
            pre_process=True,
            post_process=True,
        )
    )


def _checked_parameters(policy: Policy, params: list[LocalParam]) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by name, after they were compared with the table. Raises CheckpointError naming each
    fault.
    """
    (model,) = policy.models
    held = dict(model.named_parameters())
    expected = {param.name: param.shape for param in params}
    faults = [f"{name} is not in the table" for name in held if name not in expected]
    faults += [f"{name} is not in the model" for name in expected if name not in held]
    faults += [
        f"{name} is {list(held[name].shape)} in the model, {list(expected[name])} in the table"
        for name in expected.keys() & held.keys()
        if tuple(held[name].shape) != expected[name]
    ]
    if faults:
        raise CheckpointError(
            f"{policy.shape.architecture}: model and weight table differ: " + "; ".join(sorted(faults))
        )
    return held


@torch.no_grad()
def load_hf(policy: Policy, source: WeightSource) -> None:
    """Fill this rank's shard from `source`, reading only the blocks it holds. Padding rows become 0.

    Raises CheckpointError where the source does not hold exactly the model's tensors.
    """
    shape = policy.shape
    source.check(hf_shapes(shape, FAMILIES[shape.architecture]))
    group = tp_group()
    params = local_params(shape, group.size(), group.rank())
    held = _checked_parameters(policy, params)
    for param in params:
        target, at = held[param.name], 0
        for block in param.blocks:
            target[at : at + block.num_rows].copy_(source.read(block))
            at += block.num_rows
        target[at:].zero_()


@torch.no_grad()
def export_hf(
    policy: Policy,
    dtype: torch.dtype | None = None,
    of: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every HF tensor whole, in HF order, on every rank: a collective over the tensor-parallel group.

    dtype: of the exported tensors; their own when not given. of: what of each parameter is exported, its value by
    default (its main_grad, say, gives gradients in HF coordinates). Each tensor is new memory, never reused.
    """
    group = tp_group()
    tp, rank = group.size(), group.rank()
    shapes = hf_shapes(policy.shape, FAMILIES[policy.shape.architecture])
    tables = [local_params(policy.shape, tp, r) for r in range(tp)]
    held = _checked_parameters(policy, tables[rank])
    for shards in zip(*tables, strict=True):
        local = of(held[shards[rank].name])
        local = local if dtype is None else local.to(dtype)
        split = any(shard.blocks != shards[0].blocks for shard in shards)
        parts = [local] if not split else [torch.empty_like(local) for _ in range(tp)]
        if split:
            torch.distributed.all_gather(parts, local.contiguous(), group=group)
        yield from _assemble(shards[: len(parts)], parts, shapes)


def _assemble(
    shards: tuple[LocalParam, ...], parts: list[torch.Tensor], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Put the blocks of all shards of one Megatron parameter where they belong in its HF tensors."""
    names = list(dict.fromkeys(block.hf_name for block in shards[0].blocks))
    whole = {name: parts[0].new_empty(shapes[name]) for name in names}
    for shard, part in zip(shards, parts, strict=True):
        at = 0
        for block in shard.blocks:
            target = whole[block.hf_name][slice(*block.rows)]
            target = target if block.cols is None else target[:, slice(*block.cols)]
            target.copy_(part[at : at + block.num_rows])
            at += block.num_rows
    yield from whole.items()
