"""Checks of the folders of models: shape, weights, tokenizer, and whether the reference is the actor's twin."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

from megatron_rl.config.checks.vocabulary import vocabulary_faults
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import DataError, Fault
from megatron_rl.messages import short
from megatron_rl.models.config_json import Changes, inspect_model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tokenizers.files import tokenizer_file
from megatron_rl.models.tokenizers.templates import given_template, variables_of


class ModelShapes:
    """The models that a run names: each config.json is read once, whichever checks ask for it."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], tuple[ModelShape | None, list[Fault]]] = {}

    def inspect(self, path: str, key: str, changes: Changes | None = None) -> tuple[ModelShape | None, list[Fault]]:
        """As models.config_json.inspect_model."""
        if (path, key) not in self._read:
            self._read[path, key] = inspect_model(path, key, changes)
        shape, faults = self._read[path, key]
        return shape, [*faults]

    def actor(self, cfg: RunConfig) -> ModelShape | None:
        """The shape of model.path; None if it cannot be read, which the check `model` reports."""
        return self.inspect(cfg.model.path, "model.path", cfg.model.override_config)[0]


def model(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The model's folder describes a model that is supported."""
    return models.inspect(cfg.model.path, "model.path", cfg.model.override_config)[1]


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
        content: object = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Fault(key, str(index), f"is not valid JSON: {error}", "download it again")]
    table: object = cast("dict[str, object]", content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict):
        return [Fault(key, str(index), "has no weight_map", "download it again")]
    shards = sorted({str(name) for name in cast("dict[str, object]", table).values()})
    missing = [name for name in shards if not (Path(folder) / name).is_file()]
    if not missing:
        return []
    reason = f"{len(missing)} of {len(shards)} weight files are missing: {', '.join(missing)}"
    return [Fault(key, folder, reason, "download them again into this folder" + otherwise)]


def tokenizer(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The folder has a tokenizer that can be read, and its tokens are tokens of the model."""
    own = cfg.model.tokenizer_path
    key, folder = ("model.path", cfg.model.path) if own is None else ("model.tokenizer_path", own)
    if not folder or not Path(folder).is_dir():
        # Without a path of its own, files.model has said so already.
        missing = Fault(key, folder, "there is no such folder", "give the folder that holds the tokenizer")
        return [] if own is None else [missing]
    shape = models.actor(cfg)
    try:
        if tokenizer_file(Path(folder)).kind == "vocabulary":
            reason = "the folder has no tokenizer.json, only lists of tokens (vocab.json or vocab.txt)"
            cure = "write one with transformers (AutoTokenizer.from_pretrained, then save_pretrained)"
            return [Fault(key, folder, reason, cure)]
        return vocabulary_faults(key, folder, cfg.model.path, None if shape is None else shape.vocab_size)
    except DataError as error:
        return [_fault(key, folder, error)]


def chat_template(cfg: RunConfig) -> list[Fault]:
    """model.chat_template is a template, and used. A name is looked up where the tokenizer is loaded."""
    given = cfg.model.chat_template
    if given is None:
        return []
    if cfg.data.chat_template == "plain":
        reason = "would be without effect: data.chat_template=plain writes contents alone"
        return [Fault("model.chat_template", short(given), reason, "leave one of the two out")]
    try:
        text = given_template(given)
        if text is not None:
            variables_of(text)
    except DataError as error:
        return [_fault("model.chat_template", short(given), error)]
    return []


def _fault(key: str, value: str, error: DataError) -> Fault:
    reason, _, cure = str(error).rpartition(" -- ")
    return Fault(key, value, reason, cure)


def unused_reference(cfg: RunConfig) -> list[Fault]:
    """A reference model that is named is used."""
    if cfg.ref.path is None or cfg.needs_reference:
        return []
    reason = "nothing in this run reads the reference: actor.use_kl_loss and algorithm.use_kl_in_reward are off"
    if not cfg.needs.rollouts:
        reason = f"algorithm.name {cfg.algorithm.name} has no reference model"
    return [Fault("ref.path", cfg.ref.path, reason, "leave it out, or turn one of the two on in a GRPO run")]


def reference(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The reference model has the actor's shape and all its weights."""
    path = cfg.ref.path
    if path is None or not cfg.needs_reference:
        return []
    shape, faults = models.inspect(path, "ref.path", cfg.model.override_config)
    if shape is None:
        return faults
    actor = models.actor(cfg)
    if actor is not None:
        # The worker builds the reference from the actor's config.json: any difference would be lost.
        ours, theirs = dataclasses.asdict(actor), dataclasses.asdict(shape)
        odd = [f"{name} {theirs[name]} (actor: {ours[name]})" for name in ours if theirs[name] != ours[name]]
        odd = [text for text in odd if not text.startswith(("initializer_range", "max_position_embeddings"))]
        if odd:
            reason = f"the reference must have the actor's shape, and has {', '.join(odd)}"
            faults.append(Fault("ref.path", path, reason, "use a reference of the same model as model.path"))
    return [*faults, *weight_files(path, "ref.path", "")]
