"""From a config to running workers: the layout, the plan every rank agrees on, the group."""

from __future__ import annotations

from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.resources import resolve_device
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.layout import read_model_shape
from megatron_rl.config.run import RunConfig
from megatron_rl.parallel.topology import Topology
from megatron_rl.workers.policy import PolicyPlan, PolicyWorker


def rank_grid(topology: Topology, engine_tp: int) -> RankGrid:
    """Which data-parallel replica and which engine each rank belongs to; engines take consecutive ranks."""
    ranks = range(topology.world)
    return RankGrid(
        world=topology.world,
        dp_of_rank=tuple(topology.coords(rank).dp for rank in ranks),
        is_dp_head=tuple(topology.is_dp_head(rank) for rank in ranks),
        engine_of_rank=tuple(rank // engine_tp for rank in ranks),
        is_engine_head=tuple(rank % engine_tp == 0 for rank in ranks),
    )


def start_policy(cfg: RunConfig, total_optimizer_steps: int, with_engine: bool) -> WorkerGroup:
    """Start the colocated policy workers: actor, reference and engine on every rank."""
    device = resolve_device(cfg.cluster.device)
    topology = Topology(cfg.world_size, tp=cfg.actor.tp, pp=cfg.actor.pp, cp=cfg.actor.cp)
    plan = PolicyPlan(
        shape=read_model_shape(cfg.model.path),
        device=device,
        total_optimizer_steps=max(total_optimizer_steps, 1),
        with_engine=with_engine,
    )
    return start_group(PolicyWorker, (cfg, plan), cfg.cluster, rank_grid(topology, cfg.rollout.tp), device)
