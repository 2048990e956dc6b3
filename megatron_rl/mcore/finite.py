"""Checks for NaN and infinity: before weights change, before they are published or saved, and as they are loaded.

Every rank comes to the same verdict, since one that went on alone would wait for the others in the next collective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_rl.errors import NonFiniteError
from megatron_rl.mcore.build import Model
from megatron_rl.mcore.convert import own_params
from megatron_rl.mcore.packing import MicroBatch
from megatron_rl.messages import first_of
from megatron_rl.parallel.collectives import gathered
from megatron_rl.parallel.groups import dp_rank
from megatron_rl.reshard.views import flat_rows
from megatron_rl.types import BadMicroBatch
from megatron_rl.weights.safetensors import largest

_SHOWN = 10


def bad_losses(micros: Sequence[MicroBatch], losses: Sequence[torch.Tensor]) -> list[BadMicroBatch]:
    """The sequences with a token whose loss is not finite, from all ranks. A collective.

    losses: [n] weighted token losses of each micro-batch; empty on ranks of other stages than the last.
    """
    rank, found = torch.distributed.get_rank(), []
    for number, (micro, values) in enumerate(zip(micros, losses, strict=False)):
        wrong = ~torch.isfinite(values)
        if bool(wrong.any()):
            sequences = micro.columns["segment_ids"][wrong].unique().tolist()
            found.append(BadMicroBatch(rank, dp_rank(), number, tuple(sequences), "loss"))
    # Ranks of earlier stages have no losses and come too: all go on to bad_gradients, or none does.
    return [one for part in gathered(found) for one in part]


def bad_gradients(
    model: Model, micros: Sequence[MicroBatch], run: Callable[[Sequence[MicroBatch]], object]
) -> list[BadMicroBatch]:
    """The micro-batches whose own gradient is not finite on some rank, from all ranks. A collective.

    run: forward and backward over some micro-batches. Each is run once more, by itself and without adding gradients
    up over ranks; the gradients are of no more use afterwards. An interleaved pipeline takes as many as it has stages.
    """
    unit = model.parallel.pp if model.parallel.vpp > 1 else 1
    rank, found = torch.distributed.get_rank(), []
    for at in range(0, len(micros), unit):
        with _each_rank_alone(model):
            run(micros[at : at + unit])
        grads = [p.main_grad for chunk in model.bare_chunks for p in chunk.parameters() if p.requires_grad]  # type: ignore[attr-defined]
        if not _all_within(grads, torch.finfo(torch.float32).max):
            found += [BadMicroBatch(rank, dp_rank(), at + i, None, "gradient") for i in range(unit)]
    return [one for part in gathered(found) for one in part]


@contextlib.contextmanager
def _each_rank_alone(model: Model) -> Iterator[None]:
    """Gradients begin at 0, and backward passes leave them as each rank computed them."""
    config: Any = model.config
    saved = config.finalize_model_grads_func, config.no_sync_func
    config.finalize_model_grads_func, config.no_sync_func = None, contextlib.nullcontext
    try:
        with contextlib.ExitStack() as stack:
            for chunk in model.chunks:
                # This also turns synchronisation on again, and therefore comes first.
                chunk.zero_grad_buffer()  # type: ignore[operator]
                stack.enter_context(chunk.no_sync())  # type: ignore[operator]
            yield
    finally:
        config.finalize_model_grads_func, config.no_sync_func = saved


def _all_within(tensors: Sequence[torch.Tensor], limit: float) -> bool:
    """Whether every number of every tensor is finite and at most `limit` in size. Reads the device once."""
    if not tensors:
        return True
    # A norm of NaNs is NaN, and no comparison holds for that.
    return bool((torch.stack([largest(tensor) for tensor in tensors]) <= limit).all())


def bad_tensors(model: Model, limit: float) -> list[str]:
    """HF names of this rank's weights that hold a number which is not finite, or larger than `limit`."""
    held = [(c, name, p) for c, chunk in enumerate(model.bare_chunks) for name, p in chunk.named_parameters()]
    if _all_within([param for _, _, param in held], limit):
        return []
    found: list[str] = []
    for chunk in range(model.parallel.vpp):
        params = [*own_params(model, chunk, "weights"), *own_params(model, chunk, "adapters")]
        values = dict(model.bare_chunks[chunk].named_parameters())
        for param in params:
            at = 0
            for block in param.blocks:
                if not _all_within([flat_rows(values[param.name])[at : at + block.num_rows]], limit):
                    found.append(block.hf_name)
                at += block.num_rows
    return found or [f"{name} (rows of padding)" for _, name, p in held if not _all_within([p], limit)]


@torch.no_grad()
def refuse_bad_weights(model: Model, *, what: str, consequence: str, limit: float = math.inf) -> None:
    """Raise NonFiniteError on all ranks if any holds a weight that is not finite, or is larger than `limit`, the
    largest number of the precision that the weights go to. A collective; the weights must be on the device.
    """
    model.complete_params()
    limit = min(limit, torch.finfo(model.config.params_dtype).max)
    # Ranks whose tensors are finite come too, so that all of them raise.
    by_rank = gathered(bad_tensors(model, limit))
    names = sorted({name for names in by_rank for name in names})
    if not names:
        return
    ranks = ", ".join(str(rank) for rank, found in enumerate(by_rank) if found)
    raise NonFiniteError(
        f"{what}: {len(names)} tensors hold numbers that are not finite, or that pass {limit:.4g}, the most that the "
        f"precision they go to can hold (ranks {ranks}): {first_of(names, _SHOWN)} -- {consequence} "
        "-- lower actor.optim.lr (critic.optim.lr), or begin again from an earlier save"
    )
