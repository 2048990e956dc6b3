"""The model's shape, read from a Hugging Face config.json. Torch-free.

What a config.json asks for and this package does not compute (scaled RoPE, say) is refused here: a model that
ignores such a field runs, and is another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal, cast

from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models.fields import ARCHITECTURES, Architecture, is_finite_above_zero, unsupported

DEFAULT_INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide a transformer's tensors; all have RMSNorm, SwiGLU, RoPE, grouped-query attention.

    ffn_size: inner size of the MLP, or of one expert. num_experts: of each layer, 0 for plain MLPs; a token goes to the
    num_experts_per_tok of highest router probability, weighted by it (norm_topk_prob: scaled to sum to 1).
    """

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
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False

    def tp_choices(self) -> list[int]:
        """Tensor-parallel sizes that split heads, KV heads and the MLP (experts: see actor.etp) evenly, ascending."""
        common = gcd(self.num_heads, self.num_kv_heads, 0 if self.num_experts else self.ffn_size)
        return [tp for tp in range(1, common + 1) if common % tp == 0]

    def engine_tp_choices(self) -> list[int]:
        """Tensor-parallel sizes of a vLLM engine, ascending: KV heads are copied where there are fewer than ranks."""
        vocab = -(-self.vocab_size // 64) * 64
        return [
            tp
            for tp in range(1, self.num_heads + 1)
            if not (self.num_heads % tp or self.ffn_size % tp or vocab % tp)
            and (self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0)
        ]

    def num_parameters(self) -> int:
        """Trained numbers of the whole model; tied embeddings count once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        bias = (q_size + 2 * kv_size) if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        # A router has one row for each expert.
        mlp = 3 * self.hidden_size * self.ffn_size * max(self.num_experts, 1) + self.hidden_size * self.num_experts
        layer = attention + bias + norms + mlp
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def stage_layers(
    num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> list[list[range]]:
    """[pp][vpp] layers of each model chunk, by global number, as Megatron-Core places them.

    first, last: layers of the first and last stage where they are not an even share. A stage's layers are cut into vpp
    chunks; chunk 0 of every stage comes first, then chunk 1 of every stage, and so on.

    Raises ValueError, saying what does not divide, where the layers cannot be placed.
    Example: 8 layers, pp 2, vpp 2 -> [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    """
    counts: list[int | None] = [None] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    open_stages = counts.count(None)
    left = num_layers - sum(count for count in counts if count is not None)
    if left < 0 or (open_stages == 0 and left) or (open_stages and left % open_stages) or (open_stages and not left):
        raise ValueError(f"{left} of {num_layers} layers are left for {open_stages} of {pp} pipeline stages")
    share = left // open_stages if open_stages else 0
    sizes = [share if count is None else count for count in counts]
    odd = [size for size in sizes if size % vpp]
    if odd:
        raise ValueError(f"a stage of {odd[0]} layers cannot be cut into vpp {vpp} chunks")
    stages: list[list[range]] = [[] for _ in range(pp)]
    start = 0
    for _ in range(vpp):
        for stage, size in zip(stages, sizes, strict=True):
            stage.append(range(start, start + size // vpp))
            start += size // vpp
    return stages


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
    return (None, faults) if fields is None else _inspect(fields, str(Path(folder) / "config.json"))


HeadKind = Literal["causal", "sequence", "token"]
_CLASSIFIERS: dict[str, HeadKind] = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}


def inspect_critic(folder: str, key: str = "critic.path") -> tuple[ModelShape | None, HeadKind, list[Fault]]:
    """As inspect_model, of a model that a critic can start from: causal (without a value head), or a sequence or token
    classifier, whose score head is a value head. The shape's architecture is the causal one of the same transformer.
    """
    fields, faults = _read_json(folder, key)
    if fields is None:
        return None, "causal", faults
    names: object = fields.get("architectures")
    name = str(cast("list[object]", names)[0]) if isinstance(names, list) and names else ""
    kind: HeadKind = "causal"
    for ending, of_ending in _CLASSIFIERS.items():
        if name.endswith(ending):
            kind = of_ending
            fields = fields | {"architectures": [name.removesuffix(ending) + "ForCausalLM"]}
    shape, faults = _inspect(fields, str(Path(folder) / "config.json"))
    return shape, kind, faults


def read_critic_shape(folder: str) -> tuple[ModelShape, HeadKind]:
    """As inspect_critic; raises ConfigError with every fault."""
    shape, kind, faults = inspect_critic(folder)
    if shape is None:
        raise ConfigError(faults)
    return shape, kind


def _inspect(fields: dict[str, Any], where: str) -> tuple[ModelShape | None, list[Fault]]:
    architecture, faults = _architecture(fields, where)
    if architecture is None:
        return None, faults
    faults = [*unsupported(architecture, fields, where), *_missing_sizes(fields, where)]
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
        kind, expected = fields.get("model_type"), ARCHITECTURES[found[0]].model_type
        if kind in (None, expected):
            return found[0], []
        reason = f"does not belong to architectures {found[0]}, whose model_type is {expected}"
        cure = "copy the config.json that belongs to these weights"
        return None, [Fault(f"{where}: model_type", kind, reason, cure)]
    reason = "this architecture is not supported" if names else "does not say which architecture the model has"
    cure = f'use a model with one of the supported: {supported} (written "architectures": ["LlamaForCausalLM"])'
    return None, [Fault(f"{where}: architectures", names, reason, cure)]


def _architecture_of(fields: Mapping[str, Any]) -> Architecture:
    """Of a file whose architectures entry _architecture has accepted."""
    return ARCHITECTURES[fields["architectures"][0]]


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _missing_sizes(fields: Mapping[str, Any], where: str) -> list[Fault]:
    cure = "copy the config.json that belongs to these weights"
    architecture = _architecture_of(fields)
    sizes = [*_SIZES, architecture.ffn_size, *architecture.required]
    sizes += [_experts_entry(fields)] if architecture.experts else []
    faults = [
        Fault(f"{where}: {name}", fields.get(name), "must be a whole number above 0", cure)
        for name in sizes
        if not _is_count(fields.get(name))
    ]
    optional = {
        "num_key_value_heads": _is_count,
        "head_dim": _is_count,
        "rms_norm_eps": is_finite_above_zero,
        "rope_theta": is_finite_above_zero,
        "initializer_range": is_finite_above_zero,
    }
    faults += [
        Fault(f"{where}: {name}", fields[name], "must be a number above 0", cure)
        for name, fits in optional.items()
        if name not in sizes and _given(fields, name) and not fits(fields[name])
    ]
    theta = _rope_theta(fields)
    if not is_finite_above_zero(theta) and fields.get("rope_theta") != theta:
        faults.append(Fault(f"{where}: rope_parameters.rope_theta", theta, "must be a number above 0", cure))
    return faults


def _given(fields: Mapping[str, Any], name: str) -> bool:
    """Null is "not given" where transformers takes it so; epsilon and range it wants as numbers."""
    return name in fields and (fields[name] is not None or name in ("rms_norm_eps", "initializer_range"))


def _experts_entry(fields: Mapping[str, Any]) -> str:
    """The entry that holds the number of experts: Mixtral's name, which newer files of Qwen3-MoE have as well."""
    return "num_experts" if "num_experts" in fields else "num_local_experts"


def _rope_theta(fields: Mapping[str, Any]) -> Any:
    # transformers 5 writes rope_parameters; older files have rope_theta at the top and maybe a rope_scaling.
    rope: Any = fields.get("rope_scaling") or fields.get("rope_parameters")
    theta: Any = cast("dict[str, Any]", rope).get("rope_theta") if isinstance(rope, dict) else None
    theta = fields.get("rope_theta") if theta is None else theta
    return _architecture_of(fields).rope_theta if theta is None else theta


def _shape(name: str, fields: Mapping[str, Any]) -> ModelShape:
    architecture = ARCHITECTURES[name]
    heads: int = fields["num_attention_heads"]
    normed = architecture.norm_topk_prob
    normed = bool(fields.get("norm_topk_prob", False)) if normed is None else normed
    return ModelShape(
        architecture=name,
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        ffn_size=fields[architecture.ffn_size],
        vocab_size=fields["vocab_size"],
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=architecture.qkv_bias,
        rms_norm_eps=float(fields.get("rms_norm_eps") or architecture.rms_norm_eps),
        rope_theta=float(_rope_theta(fields)),
        max_position_embeddings=fields["max_position_embeddings"],
        initializer_range=float(fields.get("initializer_range") or DEFAULT_INITIALIZER_RANGE),
        qk_norm=architecture.qk_norm,
        num_experts=fields[_experts_entry(fields)] if architecture.experts else 0,
        num_experts_per_tok=fields["num_experts_per_tok"] if architecture.experts else 0,
        norm_topk_prob=normed and architecture.experts,
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
    return faults
