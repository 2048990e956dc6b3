"""Checks of the rollout engine: its ranks, what it is asked for, and the model that it is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder

from megatron_rl.config.checks.model import ModelShapes
from megatron_rl.config.checks.words import divisors, listed, longest_sequence, ranks
from megatron_rl.config.run import RunConfig
from megatron_rl.engines import ENGINES, PATH_FORM, Engine
from megatron_rl.errors import Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.engine import VOCAB_PADDING, engine_tp_choices
from megatron_rl.models.rules import in_float32
from megatron_rl.models.shape import Latent, ModelShape


def _engines(can: Callable[[Engine], bool]) -> str:
    """The setting that chooses an engine with a capability, for a cure."""
    return f"rollout.name={' or '.join(name for name, engine in ENGINES.items() if can(engine))}"


def engine_path(cfg: RunConfig) -> list[Fault]:
    """An engine that is named by its class has a module. Nothing of it is imported: it may need torch."""
    name = cfg.rollout.name
    module, colon, cls = name.partition(":")
    if not cfg.has_engine or not colon:
        return []
    parts = module.split(".")
    if not cls.isidentifier() or not all(part.isidentifier() for part in parts):
        cure = f"write {PATH_FORM}, or use {', '.join(ENGINES)}"
        return [Fault("rollout.name", name, "is no path of a class", cure)]
    missing = _missing_module(parts)
    if missing is None:
        return []
    cure = "correct the path, install the package, or put its folder on PYTHONPATH"
    return [Fault("rollout.name", name, f"there is no module {missing}", cure)]


def _missing_module(parts: Sequence[str]) -> str | None:
    """The first of package, package.module, ... that is not found; None if all are. Without importing the parents."""
    # This process's main module is another one on the workers.
    spec = None if parts[0] == "__main__" else importlib.util.find_spec(parts[0])
    for depth, part in enumerate(parts[1:], start=1):
        if spec is None:
            return ".".join(parts[:depth])
        # By the last name alone: a namespace package would look its parent up among the imported modules.
        folders = spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(part, list(folders))
    return ".".join(parts) if spec is None else None


def engine_layout(cfg: RunConfig) -> list[Fault]:
    """Engines of tp ranks each, on all ranks of the actor."""
    tp, name = cfg.rollout.tp, cfg.rollout.name
    if not cfg.has_engine or tp == 1:
        return []
    cure = "set rollout.tp=1: each rank then has an engine of its own"
    if not cfg.engine.multi_rank:
        others = _engines(lambda engine: engine.multi_rank)
        return [Fault("rollout.tp", tp, f"the engine {name} runs on one rank", f"{cure}; or use {others}")]
    if cfg.world_size % tp == 0:
        return []
    reason = f"does not divide the {ranks(cfg)}: engines and actor share all ranks"
    return [Fault("rollout.tp", tp, reason, f"use {listed(divisors(cfg.world_size))}")]


def engine_experts(cfg: RunConfig) -> list[Fault]:
    """Experts are dealt to the ranks of one engine, by one that can."""
    ep, tp = cfg.rollout.ep, cfg.rollout.tp
    if not cfg.has_engine or ep == 1:
        return []
    cure = "set rollout.ep=1: each rank then holds a part of every expert"
    if not cfg.engine.deals_experts:
        others = _engines(lambda engine: engine.deals_experts)
        return [Fault("rollout.ep", ep, f"the engine {cfg.rollout.name} deals no experts", f"{cure}; or use {others}")]
    if ep != tp:
        reason = (
            f"is not rollout.tp {tp}: engines of a run do not share experts, and each deals its own to its tp ranks"
        )
        return [Fault("rollout.ep", ep, reason, f"{cure}; or set rollout.tp={ep}")]
    return _cpu_lacks(cfg, "rollout.ep", ep, cure)


def _cpu_lacks(cfg: RunConfig, key: str, value: object, cure: str) -> list[Fault]:
    reason = cfg.engine.cpu_lacks.get(key)
    return [Fault(key, value, reason, cure)] if reason and cfg.cluster.device == "cpu" else []


def router_replay(cfg: RunConfig) -> list[Fault]:
    """The engine returns the experts that are to be chosen again."""
    replay = cfg.actor.router_replay
    if replay != "rollout" or not cfg.needs.rollouts:
        return []
    cure = "use actor.router_replay=old or off"
    if not cfg.engine.returns_experts:
        others = _engines(lambda engine: engine.returns_experts)
        reason = f"the engine {cfg.rollout.name} does not return the experts that tokens went to"
        return [Fault("actor.router_replay", replay, reason, f"{cure}, or {others}")]
    return _cpu_lacks(cfg, "actor.router_replay", replay, f"{cure}, or rollout.name=hf")


def routers(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """What concerns experts is given only where the model has them; a replay, where there are rollouts."""
    shape, actor = models.actor(cfg), cfg.actor
    given: dict[str, object] = {
        "actor.router_replay": None if actor.router_replay == "off" else actor.router_replay,
        "actor.router_aux_loss_coef": actor.router_aux_loss_coef or None,
        "rollout.ep": None if cfg.rollout.ep == 1 or not cfg.has_engine else cfg.rollout.ep,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if shape is not None and not shape.num_experts:
        reason = f"concerns experts, and {shape.architecture} has none"
        return [Fault(key, value, reason, "leave it out") for key, value in given.items()]
    if "actor.router_replay" in given and not cfg.needs.rollouts:
        reason = f"repeats what was chosen for rollouts, and algorithm.name {cfg.algorithm.name} has none"
        return [Fault("actor.router_replay", actor.router_replay, reason, "leave it out")]
    if shape is not None and cfg.rollout.ep > shape.num_experts:
        reason = f"is more than the {shape.num_experts} experts of {cfg.model.path}"
        return [Fault("rollout.ep", cfg.rollout.ep, reason, "set it to 1")]
    return []


def float32_routers(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """What vLLM has in float32 beside bfloat16 has one value on all ranks. A rank that trains in float32 would copy it
    as it is, and send it to others in bfloat16.
    """
    shape, dtype = models.actor(cfg), cfg.rollout.dtype
    mixed = cfg.model.dtype == "float32" and dtype == "bfloat16" and cfg.rollout.weight_sync == "reshard"
    if shape is None or not cfg.has_engine or not mixed or cfg.engine.parameters != "fused":
        return []
    if not in_float32(shape, FAMILIES[shape.architecture]):
        return []
    reason = f"the engine has routers of {shape.architecture} in float32, and ranks would get different values of them"
    return [Fault("rollout.dtype", dtype, reason, "leave it out, or set rollout.weight_sync=full")]


def engine_length(cfg: RunConfig) -> list[Fault]:
    """The engine cuts no response short."""
    longest = cfg.rollout.max_model_len
    if not cfg.has_engine or longest is None or longest >= cfg.max_sequence_length:
        return []
    reason = f"the engine would cut responses: the longest sequence is {longest_sequence(cfg)}"
    cure = f"leave it out, raise it to at least {cfg.max_sequence_length}, or lower the lengths"
    return [Fault("rollout.max_model_len", longest, reason, cure)]


def engine_keywords(cfg: RunConfig) -> list[Fault]:
    """Every keyword is known to leave samples and log-probabilities what they mean."""
    given, refuse = cfg.rollout.engine_kwargs, cfg.engine.refuse_keyword
    if given and refuse is None:
        others = _engines(lambda engine: engine.refuse_keyword is not None)
        reason = f"has no effect: the engine {cfg.rollout.name} takes no keywords"
        return [Fault("rollout.engine_kwargs", given, reason, f"remove it, or use {others}")]
    faults: list[Fault] = []
    for keyword, value in given.items():
        refused = refuse(keyword) if refuse else None
        if refused:
            faults.append(Fault(f"rollout.engine_kwargs.{keyword}", value, *refused))
    return faults


def engine_parallel(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """An engine that fuses and pads parameters can split the model over its ranks."""
    shape = models.actor(cfg)
    tp = cfg.rollout.tp
    if shape is None or not cfg.has_engine or cfg.engine.parameters != "fused" or cfg.world_size % tp:
        return []
    fitting = engine_tp_choices(shape, cfg.rollout.ep > 1)
    if tp in fitting:
        return []
    reason = (
        f"the engine {cfg.rollout.name} cannot split {cfg.model.path} so: {shape.num_heads} heads, "
        f"{shape.num_kv_heads} KV heads (a multiple or a divisor of tp), an inner size of {shape.ffn_size}, and "
        f"{shape.vocab_size} tokens padded to a multiple of {VOCAB_PADDING}"
    )
    return [Fault("rollout.tp", tp, reason, f"use {listed(fitting)}")]


def head_dim(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The engine has attention kernels for the model's heads, and reads their size."""
    shape, engine = models.actor(cfg), cfg.engine
    if shape is None or not cfg.has_engine:
        return []
    other = _engines(lambda other: other.runs_model and other.head_dims is None)
    if shape.latent is not None:
        return _latent_attention(cfg, shape, shape.latent, other)
    share = shape.hidden_size // shape.num_heads
    if shape.architecture in engine.derives_head_dim and shape.head_dim != share:
        reason = (
            f"for {shape.architecture} the engine {engine.name} takes hidden_size / num_attention_heads {share}, not "
            f"head_dim {shape.head_dim}"
        )
        return [Fault("model.path", cfg.model.path, reason, f"use another model, or {other}")]
    if engine.head_dims is None or shape.head_dim in engine.head_dims:
        return []
    reason = f"the engine {engine.name} has no attention kernels for head_dim {shape.head_dim}"
    cure = f"use a model with head_dim {listed(list(engine.head_dims))}, or {other}"
    return [Fault("model.path", cfg.model.path, reason, cure)]


def _latent_attention(cfg: RunConfig, shape: ModelShape, latent: Latent, other: str) -> list[Fault]:
    engine, on_cpu = cfg.engine, cfg.cluster.device == "cpu"
    where = "on CPUs" if on_cpu else "on GPUs"
    dims = engine.cpu_latent_dims if on_cpu else engine.latent_dims
    size = latent.kv_rank + latent.rope_dim
    faults: list[Fault] = []
    if dims is not None and size not in dims:
        reason = f"the engine {engine.name} has no kernels for latent attention of {size} numbers {where}"
        cure = f"use a model whose kv_lora_rank and qk_rope_head_dim are {listed(list(dims))} together, or {other}"
        faults.append(Fault("model.path", cfg.model.path, reason, cure))
    ropes = engine.cpu_latent_ropes
    if on_cpu and ropes is not None and shape.rope.rope_type not in ropes:
        reason = (
            f"the engine {engine.name} computes latent attention with RoPE of type {shape.rope.rope_type} wrong {where}"
        )
        faults.append(Fault("model.path", cfg.model.path, reason, f"use {other}"))
    return faults


def engine_positions(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The engine is not asked for more positions than the model knows."""
    shape, longest = models.actor(cfg), cfg.rollout.max_model_len
    if shape is None or longest is None or not cfg.has_engine or longest <= shape.max_position_embeddings:
        return []
    reason = f"the model knows {shape.max_position_embeddings} positions (max_position_embeddings)"
    return [
        Fault(
            "rollout.max_model_len",
            longest,
            reason,
            f"use at most {shape.max_position_embeddings}, or leave it out",
        )
    ]
