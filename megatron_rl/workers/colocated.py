"""Trainer and engine on the same ranks: one process, one memory, and the way by which the actor's weights reach it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from megatron_rl.config.checks.lora import adapters_of
from megatron_rl.config.run import RunConfig
from megatron_rl.data.render import Renderer
from megatron_rl.errors import ReshardError
from megatron_rl.models import FAMILIES
from megatron_rl.models.engine import live_params
from megatron_rl.models.lora import adapted_weights
from megatron_rl.models.rules import constants
from megatron_rl.models.shape import ModelShape
from megatron_rl.observe.garbage import collections_of_new_objects, no_collections
from megatron_rl.parallel.p2p import P2PGroup
from megatron_rl.parallel.topology import topology_of
from megatron_rl.reshard.adapters import AdapterPublisher, AdapterReceiver, Merging
from megatron_rl.reshard.alias import Sharing, find_sharing, sharing_off
from megatron_rl.reshard.execute import Transfer
from megatron_rl.reshard.plan import make_plan
from megatron_rl.reshard.publisher import FullPublisher, ReshardPublisher, WeightPublisher
from megatron_rl.reshard.shards import EngineLayout, engine_shards, trainer_shards, whole_shards
from megatron_rl.rollout.engine import EnginePart, EngineSettings, RolloutEngine, import_engine, make_engine
from megatron_rl.weights.companions import model_folder
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.workers.engine import EngineWorker, no_texts
from megatron_rl.workers.phases import RankMemory
from megatron_rl.workers.records import EnginePlan, TrainPlan
from megatron_rl.workers.train import TrainWorker

if TYPE_CHECKING:
    from megatron_rl.workers.model import TrainedModel

_log = logging.getLogger(__name__)


class ActorWeights:
    """The actor's weights as engines get them (workers.engine.TrainerWeights)."""

    def __init__(self, actor: TrainedModel, engine_dtype: torch.dtype) -> None:
        self._actor, self._limit = actor, torch.finfo(engine_dtype).max

    @property
    def changed(self) -> bool:
        """See TrainerWeights."""
        return self._actor.changed

    def prepare(self) -> None:
        """See TrainerWeights; the phase `publish` has brought the weights to the device."""
        self._actor.refuse_bad_weights("the actor's weights", "engines keep the weights that they have", self._limit)

    def published(self) -> None:
        """See TrainerWeights."""
        self._actor.changed = False


class ColocatedWorker:
    """A TrainWorker and an EngineWorker on one rank. Whichever works has the memory (workers/phases.py)."""

    train: TrainWorker
    engine: EngineWorker

    def __init__(self, rank: int, world: int, cfg: RunConfig, plan: TrainPlan, engine: EnginePlan) -> None:
        memory = RankMemory()
        self.train = TrainWorker(rank, world, cfg, plan, memory)
        # An engine plans its memory by what is free when it starts.
        memory.enter("generate")
        actor, dtype = self.train.trained["actor"], DTYPES[cfg.rollout.dtype or cfg.model.dtype]
        layout = engine_layout(cfg, engine.order)
        with self.train.times.phase("engine imports"), no_collections():
            import_engine(cfg.engine)
        with self.train.times.phase("engine"), collections_of_new_objects():
            built, publisher = start_engine(cfg, actor, memory, layout, device=plan.device, rank=rank)
        # One rank answers for an engine.
        is_head = layout.ranks.index(rank) % layout.tp == 0
        decode = Renderer.from_config(cfg.model, cfg.data).response_texts if is_head else no_texts
        self.engine = EngineWorker(built, publisher, memory, decode, ActorWeights(actor, dtype))

    def close(self) -> None:
        """End the engine, then leave the process groups."""
        self.engine.close()
        self.train.close()


def engine_layout(cfg: RunConfig, order: Sequence[int]) -> EngineLayout:
    """Engines of rollout.tp ranks on the processes of `order`, slot by slot."""
    return EngineLayout(cfg.rollout.tp, cfg.rollout.ep, tuple(order))


def engine_settings(cfg: RunConfig, shape: ModelShape, device: str, layout: EngineLayout, rank: int) -> EngineSettings:
    """What the engine of `rank` is built from; alike on all its ranks."""
    rollout = cfg.rollout
    number = layout.ranks.index(rank) // layout.tp
    return EngineSettings(
        name=rollout.name,
        model_path=model_folder(cfg.model.path, cfg.model.override_config),
        tokenizer_path=cfg.model.tokenizer_path or cfg.model.path,
        vocab_size=shape.vocab_size,
        max_model_len=rollout.max_model_len or cfg.max_sequence_length,
        dtype=rollout.dtype or cfg.model.dtype,
        device=device,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gb=rollout.kv_cache_gb,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        decode=rollout.decode,
        enforce_eager=rollout.enforce_eager,
        free_cache_engine=rollout.free_cache_engine,
        # Engines that share a stream of random numbers would give all replicas the same samples.
        seed=cfg.trainer.seed * 1000003 + number,
        needs_text=bool(rollout.stop),
        engine_kwargs=dict(rollout.engine_kwargs),
        adapters=adapters_of(cfg.model.lora, shape) if cfg.model.lora.sync == "adapter" else None,
        deals_experts=layout.ep > 1,
        returns_experts=cfg.actor.router_replay == "rollout",
        ranks=layout.ranks[number * layout.tp : (number + 1) * layout.tp],
    )


def start_engine(
    cfg: RunConfig, actor: TrainedModel, memory: RankMemory, layout: EngineLayout, *, device: str, rank: int
) -> tuple[RolloutEngine, WeightPublisher]:
    """Build this rank's engine and its publisher. All ranks call it. Parameters that trainer and engine store alike
    share memory if the config allows it; the publisher writes the others.

    memory: of this process. The publisher moves the actor out of it before the engine takes its KV cache.
    Raises ReshardError if the engine's parameters are not those of the model's table, or another rank's; RolloutError
    if the engine cannot be built.
    """
    from megatron_rl.mcore import shards
    from megatron_rl.mcore.convert import constant_values

    model = actor.model
    settings = engine_settings(cfg, model.shape, device, layout, rank)
    if cfg.engine.takes_whole_tensors or cfg.rollout.weight_sync == "full":
        engine = make_engine(settings)
        return engine, _full_publisher(engine, actor, memory, DTYPES[settings.dtype])
    shape = model.shape
    family = FAMILIES[shape.architecture]
    engines = (
        engine_shards(shape, family, layout)
        if cfg.engine.parameters == "fused"
        else whole_shards(shape, family, sorted(layout.ranks))
    )
    by_rank = {shard.rank: shard.params for shard in engines}
    # The model's own tensors: a value head, which the actor may have as well, is none of the engine's.
    topology = topology_of(model.parallel, len(layout.ranks))
    trainers = trainer_shards(shape, family, topology, model.parallel.stages(shape.num_layers))
    adapters = model.adapters
    merges = adapters is not None and settings.adapters is None
    merged = adapted_weights(shape, family, adapters) if merges else frozenset[str]()
    sharing = find_sharing(
        by_rank[rank], trainers[rank].params, _off(cfg, settings), merged, cfg.model.dtype != "float32"
    )
    _report(sharing)

    params = shards.parameters(model)
    names = [param.name for param in trainers[rank].params]

    def held() -> Mapping[str, torch.Tensor]:
        return {name: params[name].detach() for name in names}

    tensors = held() if sharing.shared else {}
    engine = make_engine(settings, {name: tensors[source] for name, source in sharing.shared.items()})
    check_part(engine.part, layout, rank)
    if constants(shape, family):
        # All ranks come: each has those of its own layers.
        engine.hold(constant_values(model))
    engine_side = live_params(by_rank[rank], engine.shapes())
    transfer = Transfer(
        make_plan(
            trainers,
            engines,
            node_of=lambda process: process // cfg.cluster.n_gpus_per_node,
            dtypes=(cfg.model.dtype, settings.dtype),
        ),
        P2PGroup(timeout_s=cfg.cluster.step_timeout_s),
        trainers[rank].params,
        engine_side,
        trainer_dtype=DTYPES[cfg.model.dtype],
        engine_dtype=DTYPES[settings.dtype],
        cap_bytes=cfg.rollout.sync_bucket_mb << 20,
    )

    def sources() -> Mapping[str, torch.Tensor]:
        memory.enter("publish", "actor")
        model.complete_params()
        return held()

    def release() -> None:
        memory.enter("generate")

    merger = Merging(actor.adapters, engine_side, adapters.scale) if adapters is not None and merges else None
    if adapters is None or merges:
        return engine, ReshardPublisher(transfer, engine, sources, release=release, merger=merger)
    weights = ReshardPublisher(transfer, engine, sources)
    return engine, _adapter_publisher(weights, engine, actor, release)


def _adapter_publisher(
    weights: WeightPublisher, engine: RolloutEngine, actor: TrainedModel, release: Callable[[], None]
) -> AdapterPublisher:
    trained = (param for chunk in actor.model.bare_chunks for param in chunk.parameters() if param.requires_grad)
    held_bytes = sum(param.nbytes for param in trained)
    # Its record says that it takes adapters (engines.Engine.takes_adapters).
    receiver = cast("AdapterReceiver", engine)
    return AdapterPublisher(weights, receiver, actor.adapters, held_bytes=held_bytes, release=release)


def check_part(part: EnginePart | None, layout: EngineLayout, rank: int) -> None:
    """Raise ReshardError if the engine's TP or EP rank differs from the plan's. Shapes would still match, so another
    rank's weights would be loaded silently.
    """
    slot = layout.ranks.index(rank)
    wanted = EnginePart(layout.tp, slot % layout.tp, layout.ep, slot % layout.ep)
    if part is not None and part != wanted:
        raise ReshardError(f"rank {rank}: the engine holds {part}, and the plan was made for {wanted}")


def _full_publisher(
    engine: RolloutEngine, actor: TrainedModel, memory: RankMemory, dtype: torch.dtype
) -> FullPublisher:
    def export() -> Iterator[tuple[str, torch.Tensor]]:
        memory.enter("publish", "actor")
        yield from actor.export(dtype=dtype)

    num_held = sum(param.numel() for chunk in actor.model.bare_chunks for param in chunk.parameters())
    held_bytes = num_held * dtype.itemsize
    return FullPublisher(engine, export, held_bytes=held_bytes, release=lambda: memory.enter("generate"))


def _off(cfg: RunConfig, settings: EngineSettings) -> str | None:
    return sharing_off(
        wanted=cfg.rollout.share_weights,
        engine=cfg.engine,
        dtypes=(cfg.model.dtype, settings.dtype),
        params_leave="params" in cfg.actor_training.offloaded,
    )


def _report(sharing: Sharing) -> None:
    reasons: dict[str, int] = {}
    for reason in sharing.copied.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    counted = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
    _log.info(
        "engine parameters: %d are the trainer's memory, %d are copied at each sync%s",
        len(sharing.shared),
        len(sharing.copied),
        f" ({counted})" if counted else "",
    )
