"""Rotary position embeddings (Su et al. 2021): how a family changes their frequencies. Torch-free.

RoPE turns pair i of a head by position * frequency[i]; before any change frequency[i] is theta ** (-2 i / head_dim).
A family whose config.json scales them brings a subclass of Rope: its rope_type, one dataclass field for each entry of
rope_parameters that it needs, and `scaled`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast


@dataclass(frozen=True)
class Rope:
    """Plain RoPE, and the base of every other kind."""

    rope_type: ClassVar[str] = "default"
    """The kind's name in config.json"""
    unread: ClassVar[tuple[str, ...]] = ("factor", "attention_factor")
    """Entries that mean nothing in this kind where they are null or 1"""

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0

    def scaled(self, frequencies: Sequence[float]) -> list[float]:
        """[head_dim / 2] radians a position, highest first -> the frequencies that the model uses."""
        return list(frequencies)


def read_rope(kinds: Sequence[type[Rope]], entry: object) -> Rope | str:
    """The kind that an entry rope_scaling or rope_parameters of config.json describes, or why it cannot be computed.

    kinds: those of the model's family. No entry at all is plain RoPE.
    """
    if entry is None:
        return Rope() if Rope in kinds else f"does not say which of {_names(kinds)} the model has"
    if not isinstance(entry, dict):
        return "is not a mapping"
    rope = cast("dict[str, Any]", entry)
    if any(isinstance(value, dict) for value in rope.values()):
        return "RoPE that differs by layer type is not supported"
    name = rope.get("rope_type") or rope.get("type") or "default"
    kind = next((one for one in kinds if one.rope_type == name), None)
    if kind is None:
        return f"RoPE of type {name!r} is not supported, only {_names(kinds)}"
    if not _is_one(rope.get("partial_rotary_factor")):
        return "RoPE over a part of the head is not supported"
    return _read(kind, rope)


def _names(kinds: Sequence[type[Rope]]) -> str:
    names = ["plain RoPE (rope_type default)" if kind is Rope else f"rope_type {kind.rope_type}" for kind in kinds]
    return " or ".join(names)


def _is_one(value: object) -> bool:
    return value is None or (not isinstance(value, bool) and value == 1)


def _read(kind: type[Rope], rope: Mapping[str, Any]) -> Rope | str:
    needed = [field.name for field in fields(kind)]
    missing = [name for name in needed if not is_finite_above_zero(rope.get(name))]
    if missing:
        return f"rope_type {kind.rope_type} needs {', '.join(missing)}: a number above 0"
    known = {"rope_theta", "partial_rotary_factor", *needed}
    known |= {name for name in kind.unread if _is_one(rope.get(name))}
    known |= {name for name in ("rope_type", "type") if rope.get(name) == kind.rope_type}
    odd = [name for name, value in rope.items() if value is not None and name not in known]
    if odd:
        what = "plain RoPE (rope_type default)" if kind is Rope else f"rope_type {kind.rope_type}"
        return f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'} no part of {what}"
    return kind(**{name: rope[name] for name in needed})


def is_finite_above_zero(value: object) -> bool:
    """A number above 0 that is no bool, and not infinite (JSON's Infinity)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
