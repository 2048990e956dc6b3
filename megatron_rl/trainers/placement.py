"""From a config to running workers: the layout, the plan every rank agrees on, the group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_rl.cluster import ray_runtime
from megatron_rl.cluster.dispatch import RankGrid, Replicas
from megatron_rl.cluster.nodecheck_run import node_check
from megatron_rl.cluster.resources import Device
from megatron_rl.cluster.worker_group import WorkerGroup, start_group
from megatron_rl.config.checks.lora import adapters_of
from megatron_rl.config.checks.model import read_actor_shape
from megatron_rl.config.run import RunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_critic_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.collectives import keeps_group_order
from megatron_rl.parallel.topology import Topology, topology_of
from megatron_rl.reshard.bundles import Trainers
from megatron_rl.reshard.rank_order import colocated_layout
from megatron_rl.reshard.tables import ModelTable
from megatron_rl.workers.colocated import ColocatedWorker, engine_layout
from megatron_rl.workers.records import EnginePlan, Role, RolePlan, TrainPlan
from megatron_rl.workers.saved import is_rewritten, rehearse
from megatron_rl.workers.train import TrainWorker


def engine_order(cfg: RunConfig, shape: ModelShape, topology: Topology) -> tuple[int, ...]:
    """The rank of each engine slot (slot s is tensor-parallel rank s % tp of engine s // tp), chosen so that each
    rank's actor shard overlaps its engine shard as much as possible. An engine spans as few nodes as it can.
    """
    tp, ranks = cfg.rollout.tp, tuple(range(topology.world))
    if tp == 1:
        return ranks
    return colocated_layout(
        ModelTable(shape, FAMILIES[shape.architecture]),
        Trainers(topology, cfg.actor.stages(shape.num_layers)),
        tp=tp,
        ep=engine_layout(cfg, ranks).ep,
        gpus_per_node=cfg.cluster.n_gpus_per_node,
        ascending=not keeps_group_order(),
    ).ranks


def rank_grid(topology: Topology, engine_tp: int | None, order: Sequence[int] | None = None) -> RankGrid:
    """Which data-parallel replica and which engine each rank belongs to. engine_tp: None if there are no engines.
    order: the rank of each engine slot; consecutive ranks make an engine if it is not given.
    """
    ranks = range(topology.world)
    replicas = Replicas(
        tuple(topology.coords(rank).dp for rank in ranks), tuple(topology.is_dp_head(rank) for rank in ranks)
    )
    names = tuple(_name(topology, rank) for rank in ranks)
    if engine_tp is None:
        return RankGrid(topology.world, replicas, names=names)
    slot_of = {rank: slot for slot, rank in enumerate(order or ranks)}
    engines = Replicas(
        tuple(slot_of[rank] // engine_tp for rank in ranks), tuple(slot_of[rank] % engine_tp == 0 for rank in ranks)
    )
    return RankGrid(topology.world, replicas, engines, names)


def _name(topology: Topology, rank: int) -> str:
    """A rank's coordinates, of the axes that split something."""
    at, expert = topology.coords(rank), topology.expert_coords(rank)
    axes = [("tp", topology.tp, at.tp), ("cp", topology.cp, at.cp), ("pp", topology.pp, at.pp)]
    axes += [("ep", topology.ep, expert.ep), ("dp", topology.dp, at.dp)]
    return " ".join(f"{axis} {number}" for axis, size, number in axes if size > 1)


@dataclass(frozen=True)
class Workers:
    """The worker groups of a run, by what they do: TrainWorker's methods are called on `train`, EngineWorker's on
    `engines`. On the same ranks they are one group, whose calls run one after the other.
    """

    train: WorkerGroup
    engines: WorkerGroup

    @property
    def busy_seconds(self) -> float:
        """See WorkerGroup.busy_seconds; of all groups."""
        return sum(group.busy_seconds for group in self._groups())

    def close(self) -> None:
        """End all groups; the first error is raised once every one has been ended."""
        with ExitStack() as stack:
            for group in self._groups():
                stack.callback(group.close)

    def _groups(self) -> list[WorkerGroup]:
        return [self.train] if self.engines is self.train else [self.train, self.engines]


def role_plans(
    cfg: RunConfig, optimizer_steps: int, critic_optimizer_steps: int | None = None, offload: bool = True
) -> dict[Role, RolePlan]:
    """The models of a run. critic_optimizer_steps: None if no critic is trained. offload: whether memory is given up to
    others at all.
    """
    changes, actor = cfg.model.override_config, cfg.actor_training
    head, shape = cfg.needs.reward_head, read_actor_shape(cfg)
    random, adapters = cfg.model.init == "random", adapters_of(cfg.model.lora, shape)
    with_critic = critic_optimizer_steps is not None
    roles: dict[Role, RolePlan] = {
        "actor": RolePlan(
            shape,
            actor.parallel,
            cfg.model.path,
            random,
            changes,
            lm_head=not head,
            value_head=head or (with_critic and cfg.critic.share_backbone),
            head_biased=not head,
            stored_head=read_critic_shape(cfg.model.path, changes)[1] if head else "causal",
            training=actor,
            optimizer_steps=max(optimizer_steps, 1),
            offloaded=actor.offloaded if offload else (),
            adapters=adapters,
            adapters_from=cfg.model.lora.path,
        )
    }
    if cfg.needs_reference:
        own = cfg.ref.path
        base_of: Role | None = "actor" if adapters is not None and own is None else None
        weights = own or cfg.model.path
        drawn = random and own is None
        roles["reference"] = RolePlan(shape, actor.parallel, weights, drawn, changes, base_of=base_of)
    if with_critic and not cfg.critic.share_backbone:
        critic, own = cfg.critic_training, cfg.critic.path
        critic_shape, stored_head = read_critic_shape(own or cfg.model.path, {} if own else changes)
        roles["critic"] = RolePlan(
            critic_shape,
            critic.parallel,
            own or cfg.model.path,
            random and own is None,
            {} if own else changes,
            lm_head=False,
            value_head=True,
            stored_head=stored_head,
            training=critic,
            optimizer_steps=max(critic_optimizer_steps, 1),
            offloaded=critic.offloaded if offload else (),
        )
    return roles


def start_workers(
    cfg: RunConfig, optimizer_steps: int, with_engine: bool, critic_optimizer_steps: int | None = None
) -> Workers:
    """Start the workers of a run, all on the same ranks: its models, and an engine on every rank if asked.

    See role_plans. Raises ClusterError, CheckpointError and RolloutError as start_group and the workers do.
    """
    if is_rewritten(cfg):
        # Seen now, not at the save.
        rehearse(cfg)
    with ray_runtime.joined(cfg.cluster):
        device = ray_runtime.workers_device(cfg.cluster, cfg.cluster.device)
        plan = TrainPlan(device, role_plans(cfg, optimizer_steps, critic_optimizer_steps, offload=with_engine))
        return _start(cfg, plan, device, with_engine)


def _start(cfg: RunConfig, plan: TrainPlan, device: Device, with_engine: bool) -> Workers:
    topology = topology_of(cfg.actor, cfg.world_size)
    if not with_engine:
        grid = rank_grid(topology, None)
        group = start_group(TrainWorker, (cfg, plan), cfg.cluster, grid, device, check=node_check(cfg))
        return Workers(group, group)
    order = engine_order(cfg, plan.roles["actor"].shape, topology)
    grid = rank_grid(topology, cfg.rollout.tp, order)
    args = (cfg, plan, EnginePlan(order))
    group = start_group(ColocatedWorker, args, cfg.cluster, grid, device, check=node_check(cfg))
    return Workers(group, group)
