"""Checks of how ranks are laid out: by themselves, and against the model that they split."""

from __future__ import annotations

from megatron_rl.config.checks.model import ModelShapes
from megatron_rl.config.checks.words import divisors, listed, ranks
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def actor_layout(cfg: RunConfig) -> list[Fault]:
    """tp * pp * cp divides the ranks."""
    world, parts = cfg.world_size, cfg.model_parallel_size
    if world % parts == 0:
        return []
    reason = f"tp * pp * cp = {parts} does not divide the {ranks(cfg)}"
    fitting = listed(divisors(world))
    cure = f"make tp * pp * cp one of {fitting}, or the number of ranks a multiple of {parts}"
    return [Fault("actor.tp", cfg.actor.tp, reason, cure)]


def virtual_pipeline(cfg: RunConfig) -> list[Fault]:
    """Model chunks interleave over pipeline stages, and not over two (contract R8)."""
    actor = cfg.actor
    if actor.vpp == 1:
        return []
    if actor.pp == 1:
        return [Fault("actor.vpp", actor.vpp, "interleaves pipeline stages, and actor.pp is 1", "set actor.vpp=1")]
    if actor.pp == 2:
        reason = "with two stages Megatron-Core pairs its messages up wrongly and trains on wrong gradients"
        return [Fault("actor.vpp", actor.vpp, reason, "set actor.vpp=1, or actor.pp to 3 or more")]
    return []


def uneven_pipeline(cfg: RunConfig) -> list[Fault]:
    """Sizes of the first and last stage are given only where there are stages."""
    if cfg.actor.pp > 1:
        return []
    given = {
        "actor.num_layers_in_first_pipeline_stage": cfg.actor.num_layers_in_first_pipeline_stage,
        "actor.num_layers_in_last_pipeline_stage": cfg.actor.num_layers_in_last_pipeline_stage,
    }
    reason = "there is one stage: actor.pp is 1"
    return [Fault(key, value, reason, "leave it out") for key, value in given.items() if value is not None]


def expert_layout(cfg: RunConfig) -> list[Fault]:
    """etp * ep * pp divides the ranks, and a split of single experts comes with a split of the experts."""
    actor, world = cfg.actor, cfg.world_size
    if actor.ep == 1:
        if actor.expert_tp == actor.tp:
            return []
        reason = (
            f"differs from actor.tp {actor.tp} while actor.ep is 1: Megatron-Core would add the experts' gradients up "
            "over the wrong ranks"
        )
        return [Fault("actor.etp", actor.etp, reason, "leave it out, or set actor.ep above 1")]
    parts = actor.expert_tp * actor.ep * actor.pp
    if world % parts == 0:
        return []
    reason = f"etp * ep * pp = {actor.expert_tp} * {actor.ep} * {actor.pp} = {parts} does not divide the {ranks(cfg)}"
    cure = f"make etp * ep * pp one of {listed(divisors(world))}, or the number of ranks a multiple of {parts}"
    return [Fault("actor.ep", actor.ep, reason, cure)]


def sequence_parallel(cfg: RunConfig) -> list[Fault]:
    """Sequence parallelism splits over tensor-parallel ranks."""
    if not cfg.actor.sequence_parallel or cfg.actor.tp > 1:
        return []
    reason = "splits activations between tensor-parallel ranks, and actor.tp is 1"
    return [Fault("actor.sequence_parallel", True, reason, "set it to false, or actor.tp above 1")]


def overlapped_gather(cfg: RunConfig) -> list[Fault]:
    """Weights are gathered late only where an optimizer of parts leaves them to be, and bucket by bucket."""
    actor = cfg.actor
    if not actor.overlap_param_gather:
        return []
    missing: dict[str, str] = {}
    if not actor.use_distributed_optimizer:
        missing["use_distributed_optimizer"] = "each rank updates whole weights, so that there is nothing to gather"
    if not actor.overlap_grad_reduce:
        missing["overlap_grad_reduce"] = "all weights then make one bucket, and its first layer would wait for all"
    return [
        Fault(
            "actor.overlap_param_gather",
            True,
            f"actor.{key} is off: {reason}",
            f"set actor.{key}=true, or overlap_param_gather to false",
        )
        for key, reason in missing.items()
    ]


def overlapped_chunks(cfg: RunConfig) -> list[Fault]:
    """Chunks of an interleaved pipeline would each need its own turn to send gradients and to wait for weights."""
    actor = cfg.actor
    if actor.vpp == 1:
        return []
    reason = f"does not go with the interleaved schedule of actor.vpp={actor.vpp}: its chunks would wait for each other"
    given = {
        "actor.overlap_grad_reduce": actor.overlap_grad_reduce,
        "actor.overlap_param_gather": actor.overlap_param_gather,
    }
    return [Fault(key, True, reason, f"set {key}=false, or actor.vpp=1") for key, on in given.items() if on]


def inline_backend(cfg: RunConfig) -> list[Fault]:
    """The inline backend has one rank."""
    if cfg.cluster.backend != "inline" or cfg.world_size == 1:
        return []
    reason = f"runs one rank in this process, and there are {ranks(cfg)}"
    cure = "set cluster.backend=ray, or cluster.nnodes=1 and cluster.n_gpus_per_node=1"
    return [Fault("cluster.backend", "inline", reason, cure)]


def ray_address(cfg: RunConfig) -> list[Fault]:
    """ray_address and ray_port have an effect, or are not given."""
    cluster = cfg.cluster
    given = {"ray_address": cluster.ray_address, "ray_port": cluster.ray_port}
    if cluster.backend == "inline":
        return [
            Fault(f"cluster.{key}", value, "has no effect: cluster.backend inline starts no Ray", "leave it out")
            for key, value in given.items()
            if value is not None
        ]
    if cluster.ray_address is None or cluster.ray_port is None:
        return []
    reason = f"is the port of a local Ray, and cluster.ray_address {cluster.ray_address!r} joins a running one"
    return [Fault("cluster.ray_port", cluster.ray_port, reason, "leave one of the two out")]


def groups_on_one_node(cfg: RunConfig) -> list[Fault]:
    """Tensor-parallel ranks exchange activations in every layer, so they lie on one node unless a key allows more."""
    cluster = cfg.cluster
    if cluster.nnodes == 1 or cluster.tp_across_nodes:
        return []
    sizes = {"actor.tp": cfg.actor.tp}
    if cfg.actor.etp is not None:
        sizes["actor.etp"] = cfg.actor.etp
    if cfg.has_engine:
        sizes["rollout.tp"] = cfg.rollout.tp
    per_node = cluster.n_gpus_per_node
    cure = (
        f"use a divisor of {per_node} ({listed(divisors(per_node))}), change cluster.n_gpus_per_node, or allow it with "
        "cluster.tp_across_nodes=true"
    )
    reason = f"does not divide the {per_node} ranks of a node, so that groups would lie on two nodes: far slower"
    return [Fault(key, size, reason, cure) for key, size in sizes.items() if per_node % size]


def single_node(cfg: RunConfig) -> list[Fault]:
    """What concerns several nodes is given only where there are several."""
    cluster = cfg.cluster
    if cluster.nnodes > 1:
        return []
    given = {"tp_across_nodes": cluster.tp_across_nodes or None, "network_interface": cluster.network_interface}
    return [
        Fault(f"cluster.{key}", value, "concerns several nodes, and cluster.nnodes is 1", "leave it out")
        for key, value in given.items()
        if value is not None
    ]


def tensor_parallel(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """Tensor-parallel ranks get equal parts of the model."""
    shape = models.actor(cfg)
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


def pipeline_stages(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The layers can be placed on the stages and their chunks."""
    shape, actor = models.actor(cfg), cfg.actor
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


def experts(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """Expert-parallel ranks get equal parts of the experts, and tensor-parallel ranks different tokens for them."""
    shape, actor = models.actor(cfg), cfg.actor
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
