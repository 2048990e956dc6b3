"""Checks of the folders of models: shape, weights, tokenizer, and whether the reference is the actor's twin."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_rl.config.checks.vocabulary import vocabulary_faults
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import DataError, Fault
from megatron_rl.messages import short
from megatron_rl.models.config_json import (
    Changes,
    inspect_critic,
    inspect_model,
    read_critic_shape,
    read_model_shape,
)
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tokenizers.files import tokenizer_file
from megatron_rl.models.tokenizers.templates import given_template, variables_of
from megatron_rl.models.weight_files import misfit, read_weight_files, tensor_faults


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
        return self.inspect_actor(cfg)[0]

    def inspect_actor(self, cfg: RunConfig) -> tuple[ModelShape | None, list[Fault]]:
        """The shape of model.path and its faults. A reward model starts from a language model or a reward model."""
        path, key, changes = cfg.model.path, "model.path", cfg.model.override_config
        if not cfg.needs.reward_head:
            return self.inspect(path, key, changes)
        if (path, key) not in self._read:
            shape, kind, faults = inspect_critic(path, key, changes)
            if kind == "token":
                reason = "is a token classifier, whose head has a bias that a reward model has no place for"
                faults = [*faults, Fault(key, path, reason, "use a language model, or a sequence classifier")]
            self._read[path, key] = (None if faults else shape), faults
        shape, faults = self._read[path, key]
        return shape, [*faults]


def model(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The model's folder describes a model that is supported."""
    return models.inspect_actor(cfg)[1]


def read_actor_shape(cfg: RunConfig) -> ModelShape:
    """The shape of model.path. Raises ConfigError with every fault."""
    path, changes = cfg.model.path, cfg.model.override_config
    return read_critic_shape(path, changes)[0] if cfg.needs.reward_head else read_model_shape(path, changes=changes)


def weights(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """Pretrained weights are all there, by the headers of their files."""
    if cfg.model.init != "pretrained" or not (Path(cfg.model.path) / "config.json").is_file():
        return []
    otherwise = ", or set model.init=random to start from random weights"
    # What a reward model's folder has after the transformer is looked at before workers start.
    shape = None if cfg.needs.reward_head else models.actor(cfg)
    return weight_faults(cfg.model.path, "model.path", shape, otherwise)


def weight_faults(folder: str, key: str, shape: ModelShape | None, otherwise: str = "") -> list[Fault]:
    """Faults of a folder's weight files, of their index, and, where the model's shape is known, of their tensors."""
    files = read_weight_files(Path(folder))
    faults = [Fault(key, str(one.path), one.reason, one.cure + otherwise) for one in files.faults]
    if shape is None or faults:
        return faults
    odd = tensor_faults(files.tensors, hf_shapes(shape, FAMILIES[shape.architecture]))
    cure = "copy config.json and weights again, both of one model"
    return [Fault(key, folder, misfit(odd), cure)] if odd else []


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
    if cfg.needs.preferences:
        reason = "the loss has no reference model"
        return [Fault("ref.path", cfg.ref.path, reason, "leave it out, or use algorithm.loss=dpo")]
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
    return [*faults, *weight_faults(path, "ref.path", shape)]
