"""Parameters by the keys of Megatron's torch_dist checkpoints, as megatron-core 0.16 and 0.19 write them. Pure.

Layers that are alike share a key: `decoder.layers.self_attention.linear_qkv.weight` is [layers, rows, cols], and all
experts of all layers are `decoder.layers.mlp.experts.experts.linear_fc1.weight` [layers, experts, rows, cols]. Layers
that differ have keys of their own, with their number. A norm before a projection has a name of that projection, since
Transformer Engine fuses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.convert.places import Unit
from megatron_rl.errors import CheckpointError
from megatron_rl.models.rules import Family, LocalParam, megatron_params
from megatron_rl.models.shape import ModelShape

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_NORMS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
}
"""The table's name of a norm -> other names that files have for it."""


@dataclass(frozen=True)
class DistKey:
    """Where a unit is in a checkpoint: a tensor, and the unit's indices along its leading axes of layers and experts.

    names: those that the tensor may have; the first one is written, and for a norm all of them, since models of
    Megatron's own layers and of Transformer Engine's look for it under different ones.
    """

    names: tuple[str, ...]
    lead: tuple[int, ...]
    lead_sizes: tuple[int, ...]


def refuse_form(family: Family) -> None:
    """Raise CheckpointError for a family whose parameters Megatron itself has in another form."""
    if family.compute.clamped_gate is not None:
        raise CheckpointError(
            f"{family.architecture}: Megatron's checkpoints have the rows of the gate before those of the up "
            "projection, which is not converted -- use the Hugging Face folder, which a run reads as it is"
        )


def whole_params(shape: ModelShape, family: Family) -> list[LocalParam]:
    """All parameters of a model as a single rank holds them."""
    return list(
        megatron_params(
            shape,
            family,
            tp=1,
            tp_rank=0,
            layers=range(shape.num_layers),
            pre_process=True,
            post_process=True,
        )
    )


def layers_alike(shape: ModelShape, family: Family) -> bool:
    """Whether all layers have the same parameters, of the same sizes, so that they can share keys."""
    first = family.layer(shape, 0)
    return all(family.layer(shape, layer) == first for layer in range(1, shape.num_layers))


def key_of(param: LocalParam, unit: Unit, shape: ModelShape, alike: bool, expert: int | None) -> DistKey:
    """The key of a unit. param: with its layer's number in the whole model. expert: its number in the whole model.
    alike: see layers_alike.
    """
    layer = _LAYER.match(unit.name)
    if layer is None:
        return DistKey((param.name,), (), ())
    number, name = int(layer.group(1)), layer.group(2)
    if expert is not None:
        name = re.sub(r"^mlp\.experts\.", "mlp.experts.experts.", name)
    names = (name, *_NORMS.get(name, ()))
    lead: tuple[int, ...] = (number,) if alike else ()
    sizes: tuple[int, ...] = (shape.num_layers,) if alike else ()
    prefix = "decoder.layers." if alike else f"decoder.layers.{number}."
    if expert is not None:
        lead, sizes = (*lead, expert), (*sizes, shape.num_experts)
    return DistKey(tuple(prefix + one for one in names), lead, sizes)


def extra_states(keys: Iterator[DistKey]) -> Iterator[str]:
    """The names of the objects that Megatron expects beside the weights of its linear layers, empty without FP8."""
    done: set[str] = set()
    for key in keys:
        stem, _, last = key.names[0].rpartition(".")
        if last != "weight" or not stem.rpartition(".")[2].startswith("linear_"):
            continue
        at = ".".join(map(str, key.lead)) or "0"
        of = ".".join(map(str, key.lead_sizes)) or "1"
        name = f"{stem}._extra_state/shard_{at}_{of}"
        if name not in done:
            done.add(name)
            yield name
