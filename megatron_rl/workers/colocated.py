"""The engine of a rank that trains as well, and the way by which the actor's weights reach it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ReshardError
from megatron_rl.models import FAMILIES
from megatron_rl.models.engine import live_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.links import Links
from megatron_rl.parallel.topology import topology_of
from megatron_rl.reshard.alias import Sharing, find_sharing, sharing_off
from megatron_rl.reshard.execute import Transfer
from megatron_rl.reshard.plan import make_plan
from megatron_rl.reshard.publisher import FullPublisher, ReshardPublisher, WeightPublisher
from megatron_rl.reshard.shards import EngineLayout, engine_shards, trainer_shards, whole_shards
from megatron_rl.rollout.engine import EnginePart, EngineSettings, RolloutEngine, make_engine

if TYPE_CHECKING:
    from megatron_rl.mcore.build import Model

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lending:
    """The actor's weights as a publisher borrows them. fetch: bring them to the device. lent_back: they may leave it.
    export: whole tensors in Hugging Face names, of a dtype, over all ranks.
    """

    fetch: Callable[[], None]
    lent_back: Callable[[], None]
    export: Callable[[torch.dtype], Iterator[tuple[str, torch.Tensor]]]


def engine_layout(cfg: RunConfig, order: Sequence[int]) -> EngineLayout:
    """Engines of rollout.tp ranks on the processes of `order`, slot by slot."""
    tp = cfg.rollout.tp
    return EngineLayout(tp, tp if cfg.rollout.engine_kwargs.get("enable_expert_parallel") else 1, tuple(order))


def engine_settings(cfg: RunConfig, shape: ModelShape, device: str, layout: EngineLayout, rank: int) -> EngineSettings:
    """What the engine of `rank` is built from; alike on all its ranks."""
    rollout = cfg.rollout
    number = layout.ranks.index(rank) // layout.tp
    return EngineSettings(
        name=rollout.name,
        model_path=cfg.model.path,
        tokenizer_path=cfg.model.tokenizer_path or cfg.model.path,
        vocab_size=shape.vocab_size,
        max_model_len=rollout.max_model_len or cfg.max_sequence_length,
        dtype=rollout.dtype or cfg.model.dtype,
        device=device,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gb=rollout.kv_cache_gb,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        free_cache_engine=rollout.free_cache_engine,
        # Engines that share a stream of random numbers would give all replicas the same samples.
        seed=cfg.trainer.seed * 1000003 + number,
        needs_text=bool(rollout.stop),
        engine_kwargs=dict(rollout.engine_kwargs),
        ranks=layout.ranks[number * layout.tp : (number + 1) * layout.tp],
    )


def start_engine(
    cfg: RunConfig, policy: Model, layout: EngineLayout, *, device: str, rank: int, lending: Lending
) -> tuple[RolloutEngine, WeightPublisher]:
    """Build this rank's engine, on the actor's memory where it can be, and what fills the rest. All ranks call it.

    Raises ReshardError where the engine's parameters are not those of the model's table, by name, or are another rank's
    part; RolloutError where the engine cannot be built.
    """
    from megatron_rl.mcore import shards
    from megatron_rl.mcore.build import DTYPES

    settings = engine_settings(cfg, policy.shape, device, layout, rank)
    if cfg.engine.parameters == "none" or cfg.rollout.weight_sync == "full":
        engine = make_engine(settings)
        return engine, _full_publisher(engine, policy, DTYPES[settings.dtype], lending)
    shape = policy.shape
    family = FAMILIES[shape.architecture]
    engines = (
        engine_shards(shape, family, layout)
        if cfg.engine.parameters == "fused"
        else whole_shards(shape, family, sorted(layout.ranks))
    )
    by_rank = {shard.rank: shard.params for shard in engines}
    # The model's own tensors: a value head, which the actor may have as well, is none of the engine's.
    topology = topology_of(policy.parallel, len(layout.ranks))
    trainers = trainer_shards(shape, family, topology, policy.parallel.stages(shape.num_layers))
    sharing = find_sharing(by_rank[rank], trainers[rank].params, _off(cfg, settings))
    _report(sharing)

    params = shards.parameters(policy)
    names = [param.name for param in trainers[rank].params]

    def held() -> Mapping[str, torch.Tensor]:
        return {name: params[name].detach() for name in names}

    tensors = held() if sharing.shared else {}
    engine = make_engine(settings, {name: tensors[source] for name, source in sharing.shared.items()})
    check_part(engine.part, layout, rank)
    transfer = Transfer(
        make_plan(
            trainers,
            engines,
            node_of=lambda process: process // cfg.cluster.n_gpus_per_node,
            dtypes=(cfg.model.dtype, settings.dtype),
        ),
        Links(timeout_s=cfg.cluster.step_timeout_s),
        trainers[rank].params,
        live_params(by_rank[rank], engine.shapes()),
        trainer_dtype=DTYPES[cfg.model.dtype],
        engine_dtype=DTYPES[settings.dtype],
        cap_bytes=cfg.rollout.sync_bucket_mb << 20,
    )

    def sources() -> Mapping[str, torch.Tensor]:
        lending.fetch()
        policy.complete_params()
        return held()

    return engine, ReshardPublisher(transfer, engine, sources, lent_back=lending.lent_back)


def check_part(part: EnginePart | None, layout: EngineLayout, rank: int) -> None:
    """Raise ReshardError where an engine says that it holds another part of the parameters than the plan was made
    for: shapes would agree, and weights be another rank's.
    """
    slot = layout.ranks.index(rank)
    wanted = EnginePart(layout.tp, slot % layout.tp, layout.ep, slot % layout.ep)
    if part is not None and part != wanted:
        raise ReshardError(f"rank {rank}: the engine holds {part}, and the plan was made for {wanted}")


def _full_publisher(engine: RolloutEngine, policy: Model, dtype: torch.dtype, lending: Lending) -> FullPublisher:
    def export() -> Iterator[tuple[str, torch.Tensor]]:
        lending.fetch()
        yield from lending.export(dtype)

    held = sum(param.numel() for model in policy.bare_chunks for param in model.parameters())
    return FullPublisher(engine, export, held_bytes=held * dtype.itemsize, lent_back=lending.lent_back)


def _off(cfg: RunConfig, settings: EngineSettings) -> str | None:
    return sharing_off(
        wanted=cfg.rollout.share_weights,
        engine=cfg.engine,
        dtypes=(cfg.model.dtype, settings.dtype),
        params_leave="params" in cfg.actor.offloaded,
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
