"""Checks of model.lora: what an adapter can be added to, and what it stands in the way of."""

from __future__ import annotations

import difflib

from megatron_rl.config.checks.model import ModelShapes
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.lora import ALL_LINEAR, LoraConfig
from megatron_rl.errors import Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.lora import Adapters, linear_names
from megatron_rl.models.peft_config import adapter_faults
from megatron_rl.models.shape import ModelShape


def adapters_of(lora: LoraConfig, shape: ModelShape) -> Adapters | None:
    """The adapters that a checked config asks for; None if it asks for none."""
    if not lora.rank:
        return None
    names = linear_names(shape, FAMILIES[shape.architecture])
    chosen = names if ALL_LINEAR in lora.target_modules else lora.target_modules
    targets = frozenset(chosen) - frozenset(lora.exclude_modules)
    return Adapters(lora.rank, lora.alpha, lora.dropout, targets, lora.use_rslora)


def lora_off(cfg: RunConfig) -> list[Fault]:
    """An adapter to begin from is used."""
    lora = cfg.model.lora
    if lora.rank or lora.path is None:
        return []
    reason = "names an adapter, and model.lora.rank is 0: it would not be read"
    return [Fault("model.lora.path", lora.path, reason, "set model.lora.rank to the adapter's rank (r)")]


def lora_belongs(cfg: RunConfig) -> list[Fault]:
    """The base is in files, and only the actor has adapters."""
    lora, faults = cfg.model.lora, list[Fault]()
    if not lora.rank:
        return []
    if cfg.model.init == "random":
        reason = "adapters belong to weights in files, and these are drawn from a seed"
        cure = "write them first (megatron-rl export), and name that folder in model.path with model.init=pretrained"
        faults.append(Fault("model.init", "random", reason, cure))
    if cfg.needs.reward_head:
        reason = "a reward model's head on a backbone with adapters is not offered"
        faults.append(Fault("model.lora.rank", lora.rank, reason, "set it to 0: all weights train"))
    if cfg.critic.enable and cfg.critic.share_backbone:
        reason = "a value head on a backbone with adapters is not offered"
        faults.append(Fault("model.lora.rank", lora.rank, reason, "set critic.share_backbone=false"))
    return faults


def lora_sync(cfg: RunConfig) -> list[Fault]:
    """The engine can hold adapters, if it is to get them."""
    lora, key = cfg.model.lora, "model.lora.sync"
    if not lora.rank or not cfg.has_engine or lora.sync == "merged":
        return []
    if not cfg.engine.takes_adapters:
        reason = f"the engine {cfg.engine.name} holds no adapters"
        return [Fault(key, lora.sync, reason, f"set {key}=merged, or rollout.name=vllm")]
    if cfg.rollout.weight_sync == "full":
        reason = "rollout.weight_sync is full, which gives the engine whole weights"
        return [Fault(key, lora.sync, reason, f"set {key}=merged, or rollout.weight_sync=reshard")]
    most = max(cfg.engine.adapter_ranks)
    if lora.rank > most:
        reason = f"the engine {cfg.engine.name} takes adapters of rank {most} at most"
        return [Fault("model.lora.rank", lora.rank, reason, f"set {key}=merged, or a smaller rank")]
    return []


def lora_targets(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """Each name is that of a linear layer, and at least one of them gets an adapter."""
    lora, shape = cfg.model.lora, models.actor(cfg)
    if not lora.rank or shape is None:
        return []
    names, key = linear_names(shape, FAMILIES[shape.architecture]), "model.lora.target_modules"
    faults: list[Fault] = []
    for name in lora.target_modules:
        if name == ALL_LINEAR and len(lora.target_modules) > 1:
            faults.append(Fault(key, lora.target_modules, f"{ALL_LINEAR} stands beside names", "keep one of the two"))
        elif name != ALL_LINEAR and name not in names:
            faults.append(_unknown(key, name, names, shape))
    for name in lora.exclude_modules:
        if name not in names:
            faults.append(_unknown("model.lora.exclude_modules", name, names, shape))
    reason = "vLLM folds kv_b_proj into its attention when weights come, and would leave its adapter out"
    if shape.latent is None:
        reason = "vLLM puts experts into kernels of its own once it holds adapters, which could not be run here"
    if lora.sync == "adapter" and (shape.latent or shape.num_experts) and cfg.has_engine:
        faults.append(Fault("model.lora.sync", "adapter", reason, "set model.lora.sync=merged"))
    adapters = adapters_of(lora, shape)
    if not faults and adapters is not None and not adapters.targets:
        reason = "no linear layer gets an adapter: nothing would be trained"
        faults.append(Fault(key, lora.target_modules, reason, f"name some of {', '.join(names)}"))
    return faults


def _unknown(key: str, name: str, names: tuple[str, ...], shape: ModelShape) -> Fault:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    reason = f"no linear layer of {shape.architecture} that can have an adapter is called so"
    if shape.num_experts:
        reason += " (experts and routers have none)"
    return Fault(key, name, reason, f"{hint}there are: {', '.join(names)}; or {ALL_LINEAR}")


def lora_path(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The adapter to begin from is of the run's rank, scale and targets."""
    lora, shape = cfg.model.lora, models.actor(cfg)
    if not lora.rank or lora.path is None or shape is None:
        return []
    adapters = adapters_of(lora, shape)
    assert adapters is not None
    return adapter_faults(lora.path, adapters, "model.lora.path")
