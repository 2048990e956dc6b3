"""The model's shape, read from a Hugging Face config.json. Torch-free.

What a config.json asks for and this package does not compute is refused here: a model that ignores such a field runs,
and is another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models.broken import broken_reason
from megatron_rl.models.changes import OVERRIDE, change_faults, laid_over
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.fields import Fields, is_count, rope_entries, rotary_factor, unsupported
from megatron_rl.models.layer_types import LayerTypes
from megatron_rl.models.refused import REFUSED
from megatron_rl.models.rope import Rope, Rotation, is_finite_above_zero, read_rope
from megatron_rl.models.rules import Family
from megatron_rl.models.shape import ModelShape

DEFAULT_INITIALIZER_RANGE = 0.02


Changes = Mapping[str, Any]
"""Entries laid over config.json before it is read (models/changes.py)."""


def read_model_shape(folder: str, key: str = "model.path", changes: Changes | None = None) -> ModelShape:
    """The shape that folder/config.json describes.

    key: the config key that named the folder, for messages. changes: model.override_config.
    Raises ConfigError with every fault: no such folder or file, not JSON, an architecture or feature that is
    not supported, sizes that are missing or do not fit together.
    """
    shape, faults = inspect_model(folder, key, changes)
    if shape is None:
        raise ConfigError(faults)
    return shape


def inspect_model(
    folder: str, key: str = "model.path", changes: Changes | None = None
) -> tuple[ModelShape | None, list[Fault]]:
    """As read_model_shape, but returns the faults; the shape is None when there is any."""
    fields, faults = read_config(folder, key)
    return (None, faults) if fields is None else _inspect(fields, str(Path(folder) / "config.json"), changes)


def inspect_fields(fields: dict[str, Any], where: str) -> tuple[ModelShape | None, list[Fault]]:
    """As inspect_model, of the contents of a config.json. where: what stands for its name in messages."""
    return _inspect(fields, where, None)


HeadKind = Literal["causal", "sequence", "token"]
_CLASSIFIERS: dict[str, HeadKind] = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}


def inspect_critic(
    folder: str, key: str = "critic.path", changes: Changes | None = None
) -> tuple[ModelShape | None, HeadKind, list[Fault]]:
    """As inspect_model, of a model that a critic can start from: causal (without a value head), or a sequence or token
    classifier, whose score head is a value head. The shape's architecture is the causal one of the same transformer.
    """
    fields, faults = read_config(folder, key)
    if fields is None:
        return None, "causal", faults
    name = _architecture(fields)
    kind: HeadKind = "causal"
    for ending, of_ending in _CLASSIFIERS.items():
        if name.endswith(ending):
            kind = of_ending
            fields = fields | {"architectures": [name.removesuffix(ending) + "ForCausalLM"]}
    shape, faults = _inspect(fields, str(Path(folder) / "config.json"), changes)
    return shape, kind, faults


def read_critic_shape(folder: str, changes: Changes | None = None) -> tuple[ModelShape, HeadKind]:
    """As inspect_critic; raises ConfigError with every fault."""
    shape, kind, faults = inspect_critic(folder, changes=changes)
    if shape is None:
        raise ConfigError(faults)
    return shape, kind


def _inspect(fields: Changes, where: str, changes: Changes | None) -> tuple[ModelShape | None, list[Fault]]:
    if not changes:
        return _inspect_file(fields, where)
    faults = change_faults(changes)
    if faults:
        return None, faults
    shape, faults = _inspect_file(laid_over(fields, changes), where)
    cure = "change the entry, or remove it"
    keys = {f"{where}: {name}": f"{OVERRIDE}.{name}" for name in changes}
    faults = [replace(one, key=keys[one.key], cure=cure) if one.key in keys else one for one in faults]
    return shape, faults


def _inspect_file(fields: Changes, where: str) -> tuple[ModelShape | None, list[Fault]]:
    family, faults = _family(fields, where)
    if family is None:
        return None, faults
    name, spec = family.architecture, family.fields
    faults = [*unsupported(name, spec, family.compute, fields, where), *_missing_sizes(spec, fields, where)]
    if faults:
        return None, faults
    shape = _shape(family, fields)
    faults = _misfits(shape, fields, where)
    return (None, faults) if faults else (shape, [])


def read_config(folder: str, key: str = "model.path") -> tuple[dict[str, Any] | None, list[Fault]]:
    """The entries of folder/config.json, or why there are none."""
    path = Path(folder)
    if not folder or not path.is_dir():
        reason = "there is no such folder"
        cure = "give the folder that holds config.json (relative paths start at the working directory)"
        if folder.count("/") == 1 and folder[0] not in "./~":
            owner, name = folder.split("/")
            # Shipped configs, and this very message, put models into the folder `models`: no hub's user has that name.
            source = f"OWNER/{name}" if owner == "models" else folder
            cure = (
                f"if this is a name on a model hub, download it first (`hf download {source} --local-dir "
                f"models/{name}`) and give that folder"
            )
        return None, [Fault(key, folder, reason, cure)]
    file = path / "config.json"
    if not file.is_file():
        cure = "give a folder in Hugging Face form: config.json, tokenizer.json, safetensors unless init=random"
        return None, [Fault(key, folder, "the folder has no config.json", cure)]
    try:
        fields: object = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = broken_reason(file, f"is not valid JSON: {error}")
        return None, [Fault(key, str(file), reason, "repair the file or download it again")]
    if not isinstance(fields, dict):
        return None, [Fault(key, str(file), "does not hold a JSON object", "repair the file or download it again")]
    return cast("dict[str, Any]", fields), []


def _architecture(fields: Mapping[str, Any]) -> str:
    """The first one named; "" if none is."""
    names: object = fields.get("architectures")
    return str(cast("list[object]", names)[0]) if isinstance(names, list) and names else ""


def _family(fields: Mapping[str, Any], where: str) -> tuple[Family | None, list[Fault]]:
    names: object = fields.get("architectures")
    family = next((family for name, family in FAMILIES.items() if names == [name]), None)
    if family is None:
        reason = "this architecture is not supported" if names else "does not say which architecture the model has"
        why = REFUSED.get(_architecture(fields), "")
        reason += f": {why}" if why else ""
        supported = ", ".join(FAMILIES)
        cure = f'use a model with one of the supported: {supported} (written "architectures": ["LlamaForCausalLM"])'
        return None, [Fault(f"{where}: architectures", names, reason, cure)]
    # transformers and vLLM go by model_type, this package by architectures: both must mean one model.
    kind, expected = fields.get("model_type"), family.fields.model_type
    if kind in (None, expected):
        return family, []
    reason = f"does not belong to architectures {family.architecture}, whose model_type is {expected}"
    cure = "copy the config.json that belongs to these weights"
    return None, [Fault(f"{where}: model_type", kind, reason, cure)]


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def _missing_sizes(spec: Fields, fields: Mapping[str, Any], where: str) -> list[Fault]:
    cure = "copy the config.json that belongs to these weights"
    sizes = [*_SIZES, spec.ffn_size, *spec.required]
    sizes += [_experts_entry(spec, fields)] if spec.experts else []
    faults = [
        Fault(f"{where}: {name}", fields.get(name), "must be a whole number above 0", cure)
        for name in sizes
        if not is_count(fields.get(name))
    ]
    optional = {
        "num_key_value_heads": is_count,
        "head_dim": is_count,
        "rms_norm_eps": is_finite_above_zero,
        "rope_theta": is_finite_above_zero,
        "initializer_range": is_finite_above_zero,
    }
    faults += [
        Fault(f"{where}: {name}", fields[name], "must be a number above 0", cure)
        for name, fits in optional.items()
        if name not in sizes and _given(fields, name) and not fits(fields[name])
    ]
    theta = _rope_theta(spec, fields) if spec.by_layer_type is None else 1.0
    if not is_finite_above_zero(theta) and fields.get("rope_theta") != theta:
        faults.append(Fault(f"{where}: rope_parameters.rope_theta", theta, "must be a number above 0", cure))
    return faults


def _given(fields: Mapping[str, Any], name: str) -> bool:
    """Null is "not given" where transformers takes it so; epsilon and range it wants as numbers."""
    return name in fields and (fields[name] is not None or name in ("rms_norm_eps", "initializer_range"))


def _experts_entry(spec: Fields, fields: Mapping[str, Any]) -> str:
    """The entry that holds the number of experts; newer files of Qwen3-MoE have Mixtral's name for it as well."""
    return next((name for name in spec.experts_entries if name in fields), spec.experts_entries[-1])


def _rope_theta(spec: Fields, fields: Mapping[str, Any]) -> Any:
    # transformers 5 writes rope_parameters; older files have rope_theta at the top and maybe a rope_scaling.
    rope = next(iter(rope_entries(fields).values()))
    theta: Any = cast("dict[str, Any]", rope).get("rope_theta") if isinstance(rope, dict) else None
    theta = fields.get("rope_theta") if theta is None else theta
    return spec.rope_theta if theta is None else theta


def _rope(spec: Fields, fields: Mapping[str, Any]) -> Rope:
    rope = read_rope(spec.ropes, next(iter(rope_entries(fields).values())), fields, spec.rotary_factor is not None)
    assert isinstance(rope, Rope), "fields.unsupported has refused the entry"
    return rope


def _rope_fields(spec: Fields, fields: Mapping[str, Any], windows: tuple[int, ...]) -> dict[str, Any]:
    """The fields of ModelShape about RoPE. Of a family whose layers differ, rope is that of layers without a window."""
    types = LayerTypes(fields, fields) if spec.by_layer_type is None else spec.by_layer_type(fields)
    assert isinstance(types, LayerTypes), "fields.unsupported has refused the entry"
    full, sliding = (
        Rotation(float(_rope_theta(spec, of_type)), _rope(spec, of_type)) for of_type in (types.full, types.sliding)
    )
    ropes = () if full == sliding else tuple(sliding if window else full for window in windows)
    return {"rope_theta": full.theta, "rope": full.rope, "ropes": ropes}


def _windows(spec: Fields, fields: Mapping[str, Any]) -> tuple[int, ...]:
    windows = spec.windows(fields, fields["num_hidden_layers"])
    assert isinstance(windows, tuple), "fields.unsupported has refused the entry"
    return windows


def _shape(family: Family, fields: Mapping[str, Any]) -> ModelShape:
    spec = family.fields
    heads: int = fields["num_attention_heads"]
    normed, windows = spec.norm_topk_prob, _windows(spec, fields)
    normed = bool(fields.get("norm_topk_prob", False)) if normed is None else normed
    shape = ModelShape(
        architecture=family.architecture,
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        ffn_size=fields[spec.ffn_size],
        vocab_size=fields["vocab_size"],
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", spec.tied)),
        rms_norm_eps=float(fields.get("rms_norm_eps") or spec.rms_norm_eps),
        max_position_embeddings=fields["max_position_embeddings"],
        initializer_range=float(fields.get("initializer_range") or DEFAULT_INITIALIZER_RANGE),
        num_experts=fields[_experts_entry(spec, fields)] if spec.experts else 0,
        num_experts_per_tok=fields["num_experts_per_tok"] if spec.experts else 0,
        norm_topk_prob=normed and spec.experts,
        rotary_factor=rotary_factor(spec, fields),
        windows=windows,
        **_rope_fields(spec, fields, windows),
    )
    return replace(shape, **spec.sizes(fields))


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
    return [*faults, *_expert_misfits(shape, fields, where)]


def _expert_misfits(shape: ModelShape, fields: Mapping[str, Any], where: str) -> list[Fault]:
    if not shape.num_experts:
        return []
    copy = "copy the config.json that belongs to these weights"
    faults: list[Fault] = []
    other = fields.get("num_local_experts", shape.num_experts)
    if other != shape.num_experts:
        reason = f"differs from num_experts {shape.num_experts}"
        faults.append(Fault(f"{where}: num_local_experts", other, reason, copy))
    used = shape.num_experts_per_tok
    if used > shape.num_experts:
        reason = f"is more than the number of experts, {shape.num_experts}"
        faults.append(Fault(f"{where}: num_experts_per_tok", used, reason, copy))
    if used == 1 and shape.norm_topk_prob:
        reason = "a single expert's weight is scaled to 1, so that the router has no gradient and cannot be trained"
        faults.append(
            Fault(f"{where}: num_experts_per_tok", used, reason, "use a model with 2 experts or more a token")
        )
    return faults + [Fault(f"{where}: {name}", value, reason, copy) for name, value, reason in _odd_groups(shape)]


def _odd_groups(shape: ModelShape) -> list[tuple[str, int, str]]:
    """Groups of experts that a token's experts cannot be chosen from: entry, value, reason."""
    groups, kept, experts = shape.router.groups, shape.router.groups_per_token, shape.num_experts
    if experts % groups:
        return [("n_group", groups, f"does not divide the {experts} experts")]
    if kept > groups:
        return [("topk_group", kept, f"is more than n_group {groups}")]
    if groups > 1 and shape.num_experts_per_tok > kept * (experts // groups):
        reason = f"is more than the {kept * (experts // groups)} experts of topk_group {kept} groups"
        return [("num_experts_per_tok", shape.num_experts_per_tok, reason)]
    if groups > 1 and shape.router.bias and experts // groups < 2:
        return [("n_group", groups, "leaves a group with one expert, and groups are chosen by two")]
    return []
