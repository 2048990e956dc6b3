"""A model's tensors to the ranks that write them, a piece at a time: none of it is whole on one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from megatron_rl.mcore.build import Model
from megatron_rl.mcore.convert import checked_parameters, lay, shards_of, tensor_shapes
from megatron_rl.mcore.save_plan import SavePlan, plan_save
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import constants
from megatron_rl.observe.beat import beat
from megatron_rl.parallel.p2p import P2PGroup
from megatron_rl.parallel.topology import topology_of
from megatron_rl.weights.shard_files import TensorEntry
from megatron_rl.weights.stacks import stacked


def save_plan(model: Model, dropped: Collection[str], shard_bytes: int) -> SavePlan:
    """The plan of a model's weights in the precision that they have, the same on all ranks. dropped: tensors to leave
    out of it.
    """
    float32 = constants(model.shape, FAMILIES[model.shape.architecture])
    saved = {
        name: TensorEntry(name, shape, torch.float32 if name in float32 else model.config.params_dtype)
        for name, shape in tensor_shapes(model).items()
        if name not in dropped
    }
    topology = topology_of(model.parallel, torch.distributed.get_world_size())
    return plan_save(
        topology,
        model.parallel.vpp,
        lambda stage, chunk: shards_of(model, stage, chunk),
        saved,
        shard_bytes,
    )


@torch.no_grad()
def saved_tensors(
    model: Model,
    plan: SavePlan,
    of: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach,
    timeout_s: float = 600.0,
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The tensors that this rank writes, whole, in the order of its files, on the model's device. All ranks must take
    all of theirs: the ranks that hold parts of a tensor send them to its writer. Each tensor is new memory.

    of: what of each parameter is saved, its value by default. Raises P2PError if a part does not come in timeout_s.
    """
    group = P2PGroup(timeout_s=timeout_s)
    entries = {entry.name: entry for file in plan.files.get(group.rank, {}).values() for entry in file}
    for name, tensor in stacked(_whole_tensors(model, plan, of, group)):
        yield entries[name], tensor


def _whole_tensors(
    model: Model, plan: SavePlan, of: Callable[[torch.nn.Parameter], torch.Tensor], group: P2PGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the tables that this rank writes."""
    model.complete_params()
    rank, empty = group.rank, torch.empty(0, dtype=model.config.params_dtype, device=model.device)
    held = [checked_parameters(model, chunk) for chunk in range(model.parallel.vpp)]
    # All ranks walk the pieces in one order. So of the pieces that are not over, the first has all its ranks at it.
    for piece in plan.pieces:
        what = f"save of {piece.entries[0].name}"
        values: dict[int, torch.Tensor] = {}
        if rank in piece.holders:
            beat(what)
            shard = piece.holders[rank]
            local = of(held[piece.chunk][shard.name])
            values[rank] = local[piece.number : piece.number + 1] if shard.expert else local
        if rank != piece.writer:
            if values:
                group.post([(piece.writer, values[rank].contiguous())], [], what).wait()
            continue
        like = values.get(rank, empty)
        received = {sender: like.new_empty(one.shape) for sender, one in piece.holders.items() if sender != rank}
        group.post([], list(received.items()), what).wait()
        values |= received
        whole = {entry.name: like.new_empty(entry.shape, dtype=entry.dtype) for entry in piece.entries}
        for sender, of_sender in piece.holders.items():
            lay(of_sender, values[sender], whole)
        yield from whole.items()
