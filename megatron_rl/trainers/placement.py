"""From a config to running workers: the layout, the plan every rank agrees on, the group."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.resources import resolve_device
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.layout import read_model_shape
from megatron_rl.config.run import RunConfig
from megatron_rl.data.batching import BatchPlan, plan_batches
from megatron_rl.parallel.topology import Topology, topology_of
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


def plan_for(cfg: RunConfig, seq_lens: Sequence[int], mini_of: Sequence[int]) -> BatchPlan:
    """The batch plan of a run: its data-parallel ranks, its token budget, its pipeline."""
    actor = cfg.actor
    unit = 2 * actor.cp if actor.cp > 1 else 1
    return plan_batches(
        # Context parallelism pads each sequence to whole chunks.
        [-(-length // unit) * unit for length in seq_lens],
        mini_of,
        dp=cfg.dp_size,
        max_tokens=cfg.max_tokens_per_pass,
        max_seqs=actor.ppo_micro_batch_size_per_gpu,
        multiple=actor.pp if actor.vpp > 1 else 1,
        packed=actor.packing,
    )


def start_policy(cfg: RunConfig, total_optimizer_steps: int, with_engine: bool) -> WorkerGroup:
    """Start the colocated policy workers: actor, reference and engine on every rank."""
    device = resolve_device(cfg.cluster.device)
    topology = topology_of(cfg.actor, cfg.world_size)
    plan = PolicyPlan(
        shape=read_model_shape(cfg.model.path),
        device=device,
        total_optimizer_steps=max(total_optimizer_steps, 1),
        with_engine=with_engine,
    )
    return start_group(PolicyWorker, (cfg, plan), cfg.cluster, rank_grid(topology, cfg.rollout.tp), device)
