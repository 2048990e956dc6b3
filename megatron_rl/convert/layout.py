"""Each rank's parameters under a layout, without processes: layers and experts by their numbers in the whole model."""

from __future__ import annotations

from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import LocalParam, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.parallel.topology import is_last_chunk


def layout_faults(shape: ModelShape, layout: ParallelConfig) -> list[Fault]:
    """Why a model cannot be split so; empty if it can."""
    faults: list[Fault] = []
    try:
        layout.stages(shape.num_layers)
    except ValueError as error:
        faults.append(Fault("--pp, --vpp", (layout.pp, layout.vpp), str(error), "choose other sizes"))
    if layout.tp not in shape.tp_choices():
        reason = "does not divide the heads and the MLP"
        faults.append(Fault("--tp", layout.tp, reason, f"possible: {', '.join(map(str, shape.tp_choices()))}"))
    if layout.ep > 1 and (not shape.num_experts or shape.num_experts % layout.ep):
        faults.append(Fault("--ep", layout.ep, f"does not divide {shape.num_experts} experts", "choose a divisor"))
    if shape.num_experts and shape.ffn_size % layout.expert_tp:
        reason = f"does not divide the inner size of an expert, {shape.ffn_size}"
        faults.append(Fault("--etp", layout.expert_tp, reason, "choose a divisor"))
    return faults


def ranks_of(shape: ModelShape, layout: ParallelConfig) -> list[tuple[str, list[LocalParam]]]:
    """(name of a rank, its parameters) for all ranks that hold different ones. Experts are dealt over ep x etp ranks,
    all else over tp, so each kind has its own list. Raises ConfigError if the model cannot be split so.
    """
    faults = layout_faults(shape, layout)
    if faults:
        raise ConfigError(faults)
    ranks: list[tuple[str, list[LocalParam]]] = []
    experts = layout.ep * layout.expert_tp if shape.num_experts else 0
    for stage in range(layout.pp):
        for rank in range(layout.tp):
            ranks.append((f"{stage}.{rank}", _params(shape, layout, stage, rank, 0, expert=False)))
        for rank in range(experts):
            ranks.append((f"{stage}.e{rank}", _params(shape, layout, stage, 0, rank, expert=True)))
    return ranks


def _params(
    shape: ModelShape, layout: ParallelConfig, stage: int, tp_rank: int, expert_rank: int, expert: bool
) -> list[LocalParam]:
    return [
        param
        for chunk in range(layout.vpp)
        for param in chunk_params(shape, layout, stage, chunk, tp_rank, expert_rank)
        if param.expert == expert
    ]


def chunk_params(
    shape: ModelShape, layout: ParallelConfig, stage: int, chunk: int, tp_rank: int, expert_rank: int
) -> list[LocalParam]:
    """The parameters of one model chunk on one rank, numbered within the chunk as Megatron does."""
    ep_rank, etp_rank = divmod(expert_rank, layout.expert_tp)
    return list(
        megatron_params(
            shape,
            FAMILIES[shape.architecture],
            tp=layout.tp,
            tp_rank=tp_rank,
            layers=layout.stages(shape.num_layers)[stage][chunk],
            pre_process=stage == 0 and chunk == 0,
            post_process=is_last_chunk(stage, chunk, pp=layout.pp, vpp=layout.vpp),
            ep=layout.ep,
            ep_rank=ep_rank,
            etp=layout.expert_tp,
            etp_rank=etp_rank,
        )
    )
