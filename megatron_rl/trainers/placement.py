"""From a config to running workers: the layout, the plan every rank agrees on, the group."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.cluster.dispatch import RankGrid
from megatron_rl.cluster.resources import resolve_device
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.data.batching import BatchPlan, plan_batches
from megatron_rl.models import FAMILIES
from megatron_rl.models.shape import ModelShape, read_critic_shape, read_model_shape
from megatron_rl.parallel.collectives import keeps_group_order
from megatron_rl.parallel.topology import Topology, topology_of
from megatron_rl.reshard.planning.cost import Trainers, colocated_layout
from megatron_rl.reshard.planning.tables import FamilyTable
from megatron_rl.workers.colocated import engine_layout
from megatron_rl.workers.critic import CriticPlan, CriticWorker
from megatron_rl.workers.policy import PolicyPlan, PolicyWorker
from megatron_rl.workers.saved import rehearse


def engine_order(cfg: RunConfig, shape: ModelShape, topology: Topology) -> tuple[int, ...]:
    """The rank of each engine slot (slot s: part s % tp of engine s // tp), so that what the actor's shards on a rank
    cover of its engine's part is most. Engines stay within as few nodes as they can.
    """
    tp, ranks = cfg.rollout.tp, tuple(range(topology.world))
    if tp == 1:
        return ranks
    return colocated_layout(
        FamilyTable(shape, FAMILIES[shape.architecture]),
        Trainers(topology, cfg.actor.stages(shape.num_layers)),
        tp=tp,
        ep=engine_layout(cfg, ranks).ep,
        gpus_per_node=cfg.cluster.n_gpus_per_node,
        ascending=not keeps_group_order(),
    ).ranks


def rank_grid(topology: Topology, engine_tp: int, order: Sequence[int] | None = None) -> RankGrid:
    """Which data-parallel replica and which engine each rank belongs to. order: the rank of each engine slot;
    consecutive ranks make an engine where it is not given.
    """
    ranks = range(topology.world)
    slot_of = {rank: slot for slot, rank in enumerate(order or ranks)}
    return RankGrid(
        world=topology.world,
        dp_of_rank=tuple(topology.coords(rank).dp for rank in ranks),
        is_dp_head=tuple(topology.is_dp_head(rank) for rank in ranks),
        engine_of_rank=tuple(slot_of[rank] // engine_tp for rank in ranks),
        is_engine_head=tuple(slot_of[rank] % engine_tp == 0 for rank in ranks),
    )


def plan_for(
    cfg: RunConfig, seq_lens: Sequence[int], mini_of: Sequence[int], part: ActorConfig | None = None
) -> BatchPlan:
    """The batch plan of a run: its data-parallel ranks, its token budget, its pipeline. part: the model that trains,
    the actor unless given (RunConfig.critic_training).
    """
    actor = part or cfg.actor
    unit = 2 * actor.cp if actor.cp > 1 else 1
    return plan_batches(
        # Context parallelism pads each sequence to whole chunks.
        [-(-length // unit) * unit for length in seq_lens],
        mini_of,
        dp=cfg.dp_size,
        max_tokens=actor.max_tokens_per_gpu * actor.cp,
        max_seqs=actor.ppo_micro_batch_size_per_gpu,
        multiple=actor.pp if actor.vpp > 1 else 1,
        packed=actor.packing,
    )


def start_policy(
    cfg: RunConfig, total_optimizer_steps: int, with_engine: bool, critic_optimizer_steps: int | None = None
) -> WorkerGroup:
    """Start the colocated workers: actor, reference and engine on every rank, and a critic where its optimizer
    steps are given.
    """
    if cfg.model.tokenizer_path is not None or cfg.data.chat_template == "plain":
        # Files of two folders, or a template that takes the tokenizer's place: seen now, not at the save.
        rehearse(cfg)
    device = resolve_device(cfg.cluster.device)
    topology = topology_of(cfg.actor, cfg.world_size)
    shape = read_model_shape(cfg.model.path)
    order = engine_order(cfg, shape, topology) if with_engine else ()
    plan = PolicyPlan(
        shape=shape,
        device=device,
        total_optimizer_steps=max(total_optimizer_steps, 1),
        with_engine=with_engine,
        engine_order=order,
    )
    worker, args = PolicyWorker, (cfg, plan)
    if critic_optimizer_steps is not None:
        shape, head = read_critic_shape(cfg.critic.path or cfg.model.path)
        worker, args = CriticWorker, (*args, CriticPlan(shape, head, max(critic_optimizer_steps, 1)))
    grid = rank_grid(topology, cfg.rollout.tp, order) if with_engine else rank_grid(topology, 1)
    return start_group(worker, args, cfg.cluster, grid, device)
