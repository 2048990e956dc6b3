"""The model's shape, read from a Hugging Face config.json. Torch-free.

What a config.json asks for and this package does not compute (scaled RoPE, say) is refused here: a model that
ignores such a field runs, and is another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, cast

from megatron_rl.errors import ConfigError, Fault

ARCHITECTURES: dict[str, bool] = {"Qwen2ForCausalLM": True, "LlamaForCausalLM": False}
"""Supported `architectures` entry -> does its attention add a bias to q, k and v."""
_MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}

DEFAULT_ROPE_THETA = 10000.0
DEFAULT_RMS_NORM_EPS = 1e-6
DEFAULT_INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide a transformer's tensors; all have RMSNorm, SwiGLU, RoPE, grouped-query attention."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    initializer_range: float

    def tp_choices(self) -> list[int]:
        """Tensor-parallel sizes that split heads, KV heads and the MLP evenly, ascending."""
        common = gcd(self.num_heads, self.num_kv_heads, self.ffn_size)
        return [tp for tp in range(1, common + 1) if common % tp == 0]

    def num_parameters(self) -> int:
        """Trained numbers of the whole model; tied embeddings count once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        bias = (q_size + 2 * kv_size) if self.qkv_bias else 0
        layer = attention + bias + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def read_model_shape(folder: str, key: str = "model.path") -> ModelShape:
    """The shape that folder/config.json describes.

    key: the config key that named the folder, for messages.
    Raises ConfigError with every fault: no such folder or file, not JSON, an architecture or feature that is
    not supported, sizes that are missing or do not fit together.
    """
    shape, faults = inspect_model(folder, key)
    if shape is None:
        raise ConfigError(faults)
    return shape


def inspect_model(folder: str, key: str = "model.path") -> tuple[ModelShape | None, list[Fault]]:
    """As read_model_shape, but returns the faults; the shape is None when there is any."""
    fields, faults = _read_json(folder, key)
    if fields is None:
        return None, faults
    where = str(Path(folder) / "config.json")
    architecture, faults = _architecture(fields, where)
    if architecture is None:
        return None, faults
    faults = [*_unsupported(fields, where), *_missing_sizes(fields, where)]
    if faults:
        return None, faults
    shape = _shape(architecture, fields)
    faults = _misfits(shape, fields, where)
    return (None, faults) if faults else (shape, [])


def _read_json(folder: str, key: str) -> tuple[dict[str, Any] | None, list[Fault]]:
    path = Path(folder)
    if not folder or not path.is_dir():
        reason = "there is no such folder"
        cure = "give the folder that holds config.json (relative paths start at the working directory)"
        if folder.count("/") == 1 and folder[0] not in "./~":
            cure = (
                f"if this is a name on a model hub, download it first (`hf download {folder} --local-dir "
                f"models/{folder.split('/')[1]}`) and give that folder"
            )
        return None, [Fault(key, folder, reason, cure)]
    file = path / "config.json"
    if not file.is_file():
        cure = "give a folder in Hugging Face form: config.json, tokenizer.json, safetensors unless init=random"
        return None, [Fault(key, folder, "the folder has no config.json", cure)]
    try:
        fields: object = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return None, [Fault(key, str(file), f"is not valid JSON: {error}", "repair the file or download it again")]
    if not isinstance(fields, dict):
        return None, [Fault(key, str(file), "does not hold a JSON object", "repair the file or download it again")]
    return cast("dict[str, Any]", fields), []


def _architecture(fields: Mapping[str, Any], where: str) -> tuple[str | None, list[Fault]]:
    names = fields.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    found = [name for name in ARCHITECTURES if names == [name]]
    if found:
        # transformers and vLLM go by model_type, this package by architectures: both must mean one model.
        kind, expected = fields.get("model_type"), _MODEL_TYPES[found[0]]
        if kind in (None, expected):
            return found[0], []
        reason = f"does not belong to architectures {found[0]}, whose model_type is {expected}"
        cure = "copy the config.json that belongs to these weights"
        return None, [Fault(f"{where}: model_type", kind, reason, cure)]
    reason = "this architecture is not supported" if names else "does not say which architecture the model has"
    cure = f'use a model with one of the supported: {supported} (written "architectures": ["LlamaForCausalLM"])'
    return None, [Fault(f"{where}: architectures", names, reason, cure)]


def _off(value: object) -> bool:
    return not value


def _all_full(kinds: list[object]) -> bool:
    return all(kind == "full_attention" for kind in kinds)


# Field -> (the values that this package computes, why others are refused). A field that is absent is fine.
_FEATURES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda value: value == "silu", "only the SwiGLU MLP (hidden_act silu) is computed"),
    "attention_bias": (_off, "a bias in Llama's attention projections is not supported"),
    "mlp_bias": (_off, "a bias in the MLP is not supported"),
    "attention_dropout": (_off, "dropout is not supported: log-probabilities must be the same each time"),
    "use_sliding_window": (_off, "sliding-window attention is not supported"),
    "layer_types": (
        lambda value: value is None or (isinstance(value, list) and _all_full(cast("list[object]", value))),
        "layers other than full_attention are not supported",
    ),
    "partial_rotary_factor": (
        lambda value: value in (None, 1, 1.0),
        "RoPE over a part of the head is not supported",
    ),
    "quantization_config": (_off, "quantized weights cannot be trained"),
}


def _unsupported(fields: Mapping[str, Any], where: str) -> list[Fault]:
    cure = "use a model without it; removing the field from config.json would compute another model"
    faults = [
        Fault(f"{where}: {name}", fields[name], reason, cure)
        for name, (computed, reason) in _FEATURES.items()
        if name in fields and not computed(fields[name])
    ]
    for name in ("rope_scaling", "rope_parameters"):
        reason = _rope_reason(fields.get(name))
        if reason:
            faults.append(Fault(f"{where}: {name}", fields[name], reason, cure))
    return faults


def _rope_reason(rope: object) -> str | None:
    if rope is None:
        return None
    if not isinstance(rope, dict):
        return "is not a mapping"
    rope = cast("dict[str, Any]", rope)
    if any(isinstance(value, dict) for value in rope.values()):
        return "RoPE that differs by layer type is not supported"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return f"RoPE of type {kind!r} is not supported, only plain RoPE (rope_type default)"
    if rope.get("partial_rotary_factor", 1) != 1:
        return "RoPE over a part of the head is not supported"
    return None


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _missing_sizes(fields: Mapping[str, Any], where: str) -> list[Fault]:
    cure = "copy the config.json that belongs to these weights"
    faults = [
        Fault(f"{where}: {name}", fields.get(name), "must be a whole number above 0", cure)
        for name in _SIZES
        if not _is_count(fields.get(name))
    ]
    optional = {
        "num_key_value_heads": _is_count,
        "head_dim": _is_count,
        "rms_norm_eps": _is_number,
        "rope_theta": _is_number,
    }
    faults += [
        Fault(f"{where}: {name}", fields[name], "must be a number above 0", cure)
        for name, fits in optional.items()
        if fields.get(name) is not None and not fits(fields[name])
    ]
    if fields["architectures"] == ["Qwen2ForCausalLM"] and "num_key_value_heads" not in fields:
        # transformers reads an absent entry as 32 here, whatever num_attention_heads is.
        faults.append(Fault(f"{where}: num_key_value_heads", None, "must be given for Qwen2ForCausalLM", cure))
    theta = _rope_theta(fields)
    if not _is_number(theta) and fields.get("rope_theta") != theta:
        faults.append(Fault(f"{where}: rope_parameters.rope_theta", theta, "must be a number above 0", cure))
    return faults


def _rope_theta(fields: Mapping[str, Any]) -> Any:
    # transformers 5 writes rope_parameters; older files have rope_theta at the top and maybe a rope_scaling.
    rope: Any = fields.get("rope_scaling") or fields.get("rope_parameters")
    theta: Any = cast("dict[str, Any]", rope).get("rope_theta") if isinstance(rope, dict) else None
    theta = fields.get("rope_theta") if theta is None else theta
    return DEFAULT_ROPE_THETA if theta is None else theta


def _shape(architecture: str, fields: Mapping[str, Any]) -> ModelShape:
    heads: int = fields["num_attention_heads"]
    return ModelShape(
        architecture=architecture,
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        ffn_size=fields["intermediate_size"],
        vocab_size=fields["vocab_size"],
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=ARCHITECTURES[architecture],
        rms_norm_eps=float(fields.get("rms_norm_eps") or DEFAULT_RMS_NORM_EPS),
        rope_theta=float(_rope_theta(fields)),
        max_position_embeddings=fields["max_position_embeddings"],
        initializer_range=float(fields.get("initializer_range") or DEFAULT_INITIALIZER_RANGE),
    )


def _misfits(shape: ModelShape, fields: Mapping[str, Any], where: str) -> list[Fault]:
    faults: list[Fault] = []
    if shape.num_heads % shape.num_kv_heads:
        faults.append(
            Fault(
                f"{where}: num_key_value_heads",
                shape.num_kv_heads,
                f"does not divide num_attention_heads {shape.num_heads}",
                "copy the config.json that belongs to these weights",
            )
        )
    if fields.get("head_dim") is None and shape.hidden_size % shape.num_heads:
        faults.append(
            Fault(
                f"{where}: hidden_size",
                shape.hidden_size,
                f"is not a multiple of num_attention_heads {shape.num_heads}, and head_dim is not given",
                "give head_dim, or copy the config.json that belongs to these weights",
            )
        )
    return faults
