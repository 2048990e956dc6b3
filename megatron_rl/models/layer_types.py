"""RoPE that differs between layers with a sliding window and others, read from config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron_rl.models.rope import is_finite_above_zero
from megatron_rl.models.windows import FULL, SLIDING, OddEntry


@dataclass(frozen=True)
class LayerTypes:
    """What config.json says of RoPE, as if all layers were without a window (full), or all had one (sliding)."""

    full: Mapping[str, Any]
    sliding: Mapping[str, Any]


ByLayerType = Callable[[Mapping[str, Any]], "LayerTypes | OddEntry"]


def local_and_global_rope(content: Mapping[str, Any], theta: float, local_theta: float) -> LayerTypes | OddEntry:
    """Of Gemma 3. Older files have the base of layers with a window as rope_local_base_freq, and RoPE of the others as
    every model has it; newer ones have an entry for each layer type in rope_parameters.

    theta, local_theta: bases where the file gives none.
    """
    scaling, nested = content.get("rope_scaling"), content.get("rope_parameters")
    bases = {FULL: content.get("rope_theta", theta), SLIDING: content.get("rope_local_base_freq", local_theta)}
    for name, base in zip(("rope_theta", "rope_local_base_freq"), bases.values(), strict=True):
        if not is_finite_above_zero(base):
            return OddEntry(name, "must be a number above 0")
    entries: dict[str, object] = {FULL: scaling or {}, SLIDING: {}}
    if nested not in (None, {}):
        if scaling not in (None, {}):
            return OddEntry("rope_scaling", "stands beside rope_parameters, which says the same of each layer type")
        if not isinstance(nested, dict) or not cast("dict[str, Any]", nested).keys() <= entries.keys():
            return OddEntry("rope_parameters", f"must have an entry for {FULL} and one for {SLIDING}, and no other")
        entries |= {kind: entry or {} for kind, entry in cast("dict[str, Any]", nested).items()}
    elif isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling:
        return OddEntry("rope_scaling", "has type in place of rope_type, which transformers does not read here")
    if not all(isinstance(entry, dict) for entry in entries.values()):
        return OddEntry("rope_parameters" if nested else "rope_scaling", "is not a mapping")
    of_types: dict[str, dict[str, Any]] = {
        kind: {"max_position_embeddings": content.get("max_position_embeddings")}
        | {"rope_parameters": {"rope_theta": bases[kind]} | cast("dict[str, Any]", entry)}
        for kind, entry in entries.items()
    }
    for name, (kind, base) in zip(("rope_theta", "rope_local_base_freq"), bases.items(), strict=True):
        used = of_types[kind]["rope_parameters"]["rope_theta"]
        if not is_finite_above_zero(used):
            return OddEntry("rope_parameters" if nested else "rope_scaling", "has a rope_theta that is no number > 0")
        if name in content and used != base:
            return OddEntry(name, f"differs from the rope_theta {used} of {kind}, which stands before it")
    return LayerTypes(of_types[FULL], of_types[SLIDING])
