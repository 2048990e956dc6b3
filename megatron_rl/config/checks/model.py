"""Checks of what a config names on disk: data files (by data_paths.py), the model's folder and its shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.config.checks.data_paths import GIVE, data_files
from megatron_rl.config.checks.vocabulary import vocabulary_faults
from megatron_rl.config.checks.words import divisors, listed
from megatron_rl.errors import Fault
from megatron_rl.models.shape import ModelShape, inspect_model

if TYPE_CHECKING:
    from megatron_rl.config.run import RunConfig


def train_files(cfg: RunConfig) -> list[Fault]:
    """The training files are there, of known kinds, and named once."""
    if not cfg.data.train_files:
        return [Fault("data.train_files", [], "is empty", GIVE)]
    return data_files("data.train_files", cfg.data.train_files)[1]


def val_files(cfg: RunConfig) -> list[Fault]:
    """The validation files are there, of known kinds, and named once."""
    return data_files("data.val_files", cfg.data.val_files)[1]


def eval_files(cfg: RunConfig) -> list[Fault]:
    """There is something to score the model on."""
    if cfg.data.val_files:
        return []
    reason = "eval scores the model on these files, and there are none"
    return [Fault("data.val_files", [], reason, "give at least one file")]


def shape_of(cfg: RunConfig) -> ModelShape | None:
    """The model's shape; None when it cannot be read, which files.model reports."""
    return inspect_model(cfg.model.path)[0]


def model(cfg: RunConfig) -> list[Fault]:
    """The model's folder describes a model that is supported."""
    return inspect_model(cfg.model.path)[1]


def weights(cfg: RunConfig) -> list[Fault]:
    """Pretrained weights are all there."""
    if cfg.model.init != "pretrained" or not (Path(cfg.model.path) / "config.json").is_file():
        return []
    return weight_files(cfg.model.path, "model.path", ", or set model.init=random to start from random weights")


def weight_files(folder: str, key: str, otherwise: str) -> list[Fault]:
    """Faults of a folder whose safetensors are missing, or incomplete by their own index."""
    index, single = Path(folder) / "model.safetensors.index.json", Path(folder) / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return []
        reason = "the folder has neither model.safetensors nor model.safetensors.index.json"
        cure = "put the weights there" + otherwise
        if list(Path(folder).glob("pytorch_model*.bin")):
            reason += ", only PyTorch .bin files"
            cure = "convert them: load with transformers and save_pretrained, which writes safetensors" + otherwise
        return [Fault(key, folder, reason, cure)]
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Fault(key, str(index), f"is not valid JSON: {error}", "download it again")]
    table: object = cast("dict[str, Any]", content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict):
        return [Fault(key, str(index), "has no weight_map", "download it again")]
    shards = sorted({str(name) for name in cast("dict[str, Any]", table).values()})
    missing = [name for name in shards if not (Path(folder) / name).is_file()]
    if not missing:
        return []
    reason = f"{len(missing)} of {len(shards)} weight files are missing: {', '.join(missing)}"
    return [Fault(key, folder, reason, "download them again into this folder" + otherwise)]


def tokenizer(cfg: RunConfig) -> list[Fault]:
    """The tokenizer's folder has a tokenizer.json."""
    own = cfg.model.tokenizer_path
    key, folder = ("model.path", cfg.model.path) if own is None else ("model.tokenizer_path", own)
    if not folder or not Path(folder).is_dir():
        # Without a path of its own, files.model has said so already.
        missing = Fault(key, folder, "there is no such folder", "give the folder that holds tokenizer.json")
        return [] if own is None else [missing]
    if (Path(folder) / "tokenizer.json").is_file():
        return []
    cure = "give model.tokenizer_path, a folder with tokenizer.json" if own is None else "give a folder that has it"
    if any((Path(folder) / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        cure += "; transformers writes one from older files (AutoTokenizer.from_pretrained, then save_pretrained)"
    return [Fault(key, folder, "the folder has no tokenizer.json", cure)]


def vocabulary(cfg: RunConfig) -> list[Fault]:
    """The tokenizer's tokens are tokens of the model."""
    shape, own = shape_of(cfg), cfg.model.tokenizer_path
    if shape is None:
        return []
    key = "model.path" if own is None else "model.tokenizer_path"
    return vocabulary_faults(key, own or cfg.model.path, cfg.model.path, shape.vocab_size)


def reference(cfg: RunConfig) -> list[Fault]:
    """The reference model has the actor's shape and all its weights."""
    path = cfg.ref.path
    if path is None or not cfg.needs_reference:
        return []
    shape, faults = inspect_model(path, "ref.path")
    if shape is None:
        return faults
    actor = shape_of(cfg)
    if actor is not None:
        # The worker builds the reference from the actor's config.json: any difference would be lost.
        ours, theirs = dataclasses.asdict(actor), dataclasses.asdict(shape)
        odd = [f"{name} {theirs[name]} (actor: {ours[name]})" for name in ours if theirs[name] != ours[name]]
        odd = [text for text in odd if not text.startswith(("initializer_range", "max_position_embeddings"))]
        if odd:
            reason = f"the reference must have the actor's shape, and has {', '.join(odd)}"
            faults.append(Fault("ref.path", path, reason, "use a reference of the same model as model.path"))
    return [*faults, *weight_files(path, "ref.path", "")]


def tensor_parallel(cfg: RunConfig) -> list[Fault]:
    """Tensor-parallel ranks get equal parts of the model."""
    shape = shape_of(cfg)
    tp = cfg.actor.tp
    if shape is None:
        return []
    sizes = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    if not shape.num_experts:
        sizes["intermediate_size"] = shape.ffn_size
    odd = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if not odd:
        return []
    reason = f"does not divide {' and '.join(odd)} of {cfg.model.path}"
    return [Fault("actor.tp", tp, reason, f"use {listed(shape.tp_choices())}")]


def experts(cfg: RunConfig) -> list[Fault]:
    """Expert-parallel ranks get equal parts of the experts, and tensor-parallel ranks different tokens for them."""
    shape, actor = shape_of(cfg), cfg.actor
    if shape is None:
        return []
    if not shape.num_experts:
        given = {"actor.ep": None if actor.ep == 1 else actor.ep, "actor.etp": actor.etp}
        reason = f"splits experts, and {shape.architecture} has none"
        return [Fault(key, value, reason, "leave it out") for key, value in given.items() if value is not None]
    faults: list[Fault] = []
    if shape.num_experts % actor.ep:
        reason = f"does not divide the {shape.num_experts} experts of {cfg.model.path}"
        faults.append(Fault("actor.ep", actor.ep, reason, f"use {listed(divisors(shape.num_experts))}"))
    if shape.ffn_size % actor.expert_tp:
        key = "actor.tp" if actor.etp is None else "actor.etp"
        reason = f"does not divide the experts' inner size {shape.ffn_size} of {cfg.model.path}"
        faults.append(Fault(key, actor.expert_tp, reason, f"use a divisor of {shape.ffn_size}"))
    if actor.tp > 1 and not actor.sequence_parallel:
        reason = (
            f"must be on for a model with experts at actor.tp {actor.tp}: Megatron-Core trains them in no other way"
        )
        faults.append(Fault("actor.sequence_parallel", False, reason, "set it to true, or actor.tp=1"))
    return faults


def pipeline_stages(cfg: RunConfig) -> list[Fault]:
    """The layers can be placed on the stages and their chunks."""
    shape, actor = shape_of(cfg), cfg.actor
    if shape is None:
        return []
    try:
        actor.stages(shape.num_layers)
    except ValueError as error:
        cure = (
            f"use a divisor of {shape.num_layers} layers, or give the first or last stage its own number "
            "(actor.num_layers_in_first_pipeline_stage, actor.num_layers_in_last_pipeline_stage)"
        )
        return [Fault("actor.pp", actor.pp, str(error), cure)]
    return []


def positions(cfg: RunConfig) -> list[Fault]:
    """The longest sequence lies within the positions that the model knows."""
    shape, longest = shape_of(cfg), cfg.max_sequence_length
    if shape is None or longest <= shape.max_position_embeddings:
        return []
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    reason = (
        f"with data.max_prompt_length {prompt} a sequence may have {longest} tokens, and the model knows "
        f"{shape.max_position_embeddings} positions (max_position_embeddings)"
    )
    cure = f"make the two sum to at most {shape.max_position_embeddings}"
    return [Fault("data.max_response_length", response, reason, cure)]
