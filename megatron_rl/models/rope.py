"""Rotary position embeddings (Su et al. 2021): how a family changes their frequencies. Torch-free.

RoPE turns pair i of a head by position * frequency[i]; before any change frequency[i] is theta ** (-2 i / head_dim).
A kind that scales them is a subclass of Rope: its rope_type, one dataclass field for each entry of rope_parameters
that it reads (a field without a default is one that it needs), and `scaled`. A family says which kinds it computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, cast

_PRETRAINED = "original_max_position_embeddings"


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

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention's logits."""
        return 1.0

    def scaled(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """[rotary_dim / 2] radians a position, highest first -> the frequencies that the model uses.

        theta: the base that they are powers of.
        """
        return list(frequencies)

    def fault(self, positions: int) -> str:
        """Why transformers and vLLM would not compute the same up to max_position_embeddings `positions`, or ""."""
        return ""


@dataclass(frozen=True)
class Linear(Rope):
    """Positions divided by a factor (Chen et al. 2023)."""

    rope_type: ClassVar[str] = "linear"
    unread: ClassVar[tuple[str, ...]] = ("attention_factor",)
    factor: float

    def scaled(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """See Rope."""
        return [one / self.factor for one in frequencies]

    def fault(self, positions: int) -> str:
        """See Rope."""
        # vLLM takes a whole number for a list of factors, and fails.
        whole = isinstance(self.factor, int)
        return f"vLLM reads factor {self.factor} of rope_type linear only as {self.factor}.0" if whole else ""


@dataclass(frozen=True)
class Dynamic(Rope):
    """Plain RoPE up to max_position_embeddings, and a base that grows with the length beyond, where no run goes."""

    rope_type: ClassVar[str] = "dynamic"
    unread: ClassVar[tuple[str, ...]] = ("attention_factor",)
    factor: float


@dataclass(frozen=True)
class Llama3(Rope):
    """Llama 3.1: low frequencies are divided by a factor, high ones stay, those between are mixed."""

    rope_type: ClassVar[str] = "llama3"
    unread: ClassVar[tuple[str, ...]] = ("attention_factor",)
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float
    """Positions of the model before its context was made longer"""

    def scaled(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """See Rope."""
        return [self._scaled(one) for one in frequencies]

    def _scaled(self, frequency: float) -> float:
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        weight = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - weight) * frequency / self.factor + weight * frequency

    def fault(self, positions: int) -> str:
        """See Rope."""
        low, high = self.low_freq_factor, self.high_freq_factor
        return "" if low < high else f"low_freq_factor {low} must be below high_freq_factor {high}"


@dataclass(frozen=True)
class Yarn(Rope):
    """YaRN (Peng et al. 2023): as Llama3 with the mixture by the pair's number, and larger cosines and sines."""

    rope_type: ClassVar[str] = "yarn"
    unread: ClassVar[tuple[str, ...]] = ()
    factor: float
    original_max_position_embeddings: float
    """Positions of the model before its context was made longer"""
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32
    """Pairs that make more turns in the first context than this keep their frequency"""
    beta_slow: float = 1
    """Pairs that make fewer turns than this have it divided by the factor"""
    truncate: bool = True
    """Ends of the mixture are whole numbers"""

    @property
    def amplitude(self) -> float:
        """See Rope."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def scaled(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """See Rope."""
        dim = 2 * len(frequencies)

        def pair(turns: float) -> float:
            ratio = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return dim * math.log(ratio) / (2 * math.log(theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 if first == last else 0
        weights = [min(max((number - first) / (last - first), 0.0), 1.0) for number in range(len(frequencies))]
        return [
            one / self.factor * weight + one * (1 - weight) for one, weight in zip(frequencies, weights, strict=True)
        ]

    def fault(self, positions: int) -> str:
        """See Rope."""
        known = self.original_max_position_embeddings * self.factor
        if positions <= known:
            return ""
        reason = f"max_position_embeddings {positions} is more than factor x {_PRETRAINED} = {known:g}"
        return f"{reason}, where vLLM's table of cosines ends"


@dataclass(frozen=True)
class LatentYarn(Yarn):
    """YaRN of latent attention (DeepSeek-AI 2024): mscale_all_dim makes the attention's logits larger."""

    @property
    def softmax_factor(self) -> float:
        """See Rope."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def fault(self, positions: int) -> str:
        """See Rope."""
        if self.attention_factor is not None:
            return "attention_factor is read by vLLM in another way in this family"
        if bool(self.mscale) != bool(self.mscale_all_dim):
            return "mscale and mscale_all_dim belong together: transformers and vLLM fill in different values"
        return super().fault(positions)


@dataclass(frozen=True)
class EngineYarn(Yarn):
    """YaRN as vLLM computes gpt-oss."""

    def fault(self, positions: int) -> str:
        """See Rope."""
        if any(value is not None for value in (self.attention_factor, self.mscale, self.mscale_all_dim)):
            return "attention_factor, mscale and mscale_all_dim are not read by vLLM in this family"
        return super().fault(positions)


@dataclass(frozen=True)
class Rotation:
    """RoPE of a layer: the base of the frequencies, and what is done to them."""

    theta: float
    rope: Rope


KINDS: tuple[type[Rope], ...] = (Rope, Linear, Dynamic, Llama3, Yarn)
"""Kinds that transformers and vLLM compute in every family that has RoPE over whole heads, one kind for all layers."""


def read_rope(
    kinds: Sequence[type[Rope]], entry: object, model: Mapping[str, Any] | None = None, partial: bool = False
) -> Rope | str:
    """The kind that an entry rope_scaling or rope_parameters of config.json describes, or why it cannot be computed.

    kinds: those of the model's family. No entry at all is plain RoPE. model: all of config.json, which may have
    original_max_position_embeddings at its top. partial: the family may turn a part of a head.
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
    share = rope.get("partial_rotary_factor")
    if not (_is_one(share) or (partial and is_share(share))):
        return "RoPE over a part of the head is not supported"
    if any(field.name == _PRETRAINED for field in fields(kind)):
        positions = _pretrained(rope, model or {})
        if isinstance(positions, str):
            return positions
        rope = rope | positions
    read = _read(kind, rope)
    if isinstance(read, str):
        return read
    known = (model or {}).get("max_position_embeddings")
    return (read.fault(known) if isinstance(known, int) else "") or read


def _pretrained(rope: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, object] | str:
    """original_max_position_embeddings as transformers 5 reads it: from the top of config.json, from the entry, or
    max_position_embeddings. Other versions read the entry first, so that two different numbers are refused.
    """
    inner, top = rope.get(_PRETRAINED), model.get(_PRETRAINED)
    if _PRETRAINED in model and top is None:
        return f"{_PRETRAINED} at the top of config.json is null, which stands before the entry's"
    if None not in (inner, top) and inner != top:
        return f"{_PRETRAINED} {inner} differs from {top} at the top of config.json"
    numbers = (top, inner, model.get("max_position_embeddings"))
    return {_PRETRAINED: next((one for one in numbers if one is not None), None)}


def _names(kinds: Sequence[type[Rope]]) -> str:
    return " or ".join(_name(kind) for kind in kinds)


def _name(kind: type[Rope]) -> str:
    return "plain RoPE (rope_type default)" if kind is Rope else f"rope_type {kind.rope_type}"


def _is_one(value: object) -> bool:
    return value is None or (not isinstance(value, bool) and value == 1)


def _read(kind: type[Rope], rope: Mapping[str, Any]) -> Rope | str:
    read = fields(kind)
    missing = [
        field.name for field in read if field.default is MISSING and not is_finite_above_zero(rope.get(field.name))
    ]
    if missing:
        return f"{_name(kind)} needs {', '.join(missing)}: a number above 0"
    given = [field for field in read if field.name in rope]
    wrong = next((field for field in given if not _fits(field, rope[field.name])), None)
    if wrong is not None:
        wanted = "true or false" if isinstance(wrong.default, bool) else "a number above 0"
        return f"{wrong.name} {rope[wrong.name]!r} of {_name(kind)} must be {wanted}"
    known = {"rope_theta", "partial_rotary_factor", *(field.name for field in read)}
    known |= {name for name in kind.unread if _is_one(rope.get(name))}
    known |= {name for name in ("rope_type", "type") if rope.get(name) == kind.rope_type}
    odd = [name for name, value in rope.items() if value is not None and name not in known]
    if odd:
        return f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'} no part of {_name(kind)}"
    return kind(**{field.name: rope[field.name] for field in given})


def _fits(field: Field[Any], value: object) -> bool:
    """Null and 0 are as good as no entry only where transformers and vLLM both take them so."""
    if isinstance(field.default, bool):
        return isinstance(value, bool)
    empty = value is None or (not isinstance(value, bool) and value == 0)
    return is_finite_above_zero(value) or (field.default is None and empty)


def is_share(value: object) -> bool:
    """A number above 0, and at most 1."""
    return is_finite_above_zero(value) and cast("float", value) <= 1


def is_finite_above_zero(value: object) -> bool:
    """A number above 0 that is no bool, and not infinite (JSON's Infinity)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
