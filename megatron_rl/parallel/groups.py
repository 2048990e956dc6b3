"""Megatron's process groups from a Topology. Only this module starts torch.distributed and parallel_state."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
from __future__ import annotations

import datetime
from typing import cast

import torch
from megatron.core import parallel_state

from megatron_rl.parallel.topology import Topology

AFTER_DEADLINE_S = 60.0
"""How much longer a collective waits than the call that it is part of."""


def init_process_group(rank: int, world: int, device: str, timeout_s: float = 600.0) -> None:
    """Join the default process group (nccl on cuda, gloo on cpu); MASTER_ADDR and MASTER_PORT say where."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def init_model_parallel(topology: Topology, vpp: int = 1) -> None:
    """Build megatron's groups for `topology` over the default process group. vpp: model chunks of a pipeline stage.

    Raises RuntimeError where megatron already holds groups of another shape: a process has one layout.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=topology.tp,
            pipeline_model_parallel_size=topology.pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=topology.cp,
            expert_model_parallel_size=topology.ep,
            expert_tensor_parallel_size=topology.expert_tp,
            create_gloo_process_groups=False,
        )
    rank = torch.distributed.get_rank()
    at, expert = topology.coords(rank), topology.expert_coords(rank)
    seen = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )
    wanted = (at.tp, at.cp, at.dp, at.pp, expert.etp, expert.ep, expert.edp)
    if seen != wanted:
        raise RuntimeError(
            f"rank {rank}: megatron places it at (tp, cp, dp, pp, etp, ep, edp) = {seen}, the topology at "
            f"{wanted}; a process cannot change its layout, start new ones"
        )


def tp_group() -> torch.distributed.ProcessGroup:
    """This rank's tensor-parallel group."""
    return cast(torch.distributed.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def cp_group() -> torch.distributed.ProcessGroup:
    """The ranks that hold other parts of the same sequences."""
    return cast(torch.distributed.ProcessGroup, parallel_state.get_context_parallel_group())


def dp_rank() -> int:
    """Which part of a mini-batch's sequences this rank works on."""
    return cast(int, parallel_state.get_data_parallel_rank())


def expert_group() -> torch.distributed.ProcessGroup:
    """The ranks that together hold one copy of this stage's experts, in the order ep rank, then etp rank."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    return cast(torch.distributed.ProcessGroup, group)


def pp_group() -> torch.distributed.ProcessGroup:
    """The ranks that hold other layers of the same model."""
    return cast(torch.distributed.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def ends_pipeline() -> bool:
    """Whether this rank is of the last pipeline stage, where losses and columns are."""
    return pp_group().rank() == pp_group().size() - 1


def dp_group() -> torch.distributed.ProcessGroup:
    """The ranks that hold other sequences of the same batch."""
    return cast(torch.distributed.ProcessGroup, parallel_state.get_data_parallel_group())


def dp_cp_group() -> torch.distributed.ProcessGroup:
    """The ranks that hold other tokens of the same batch: data and context parallel together."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return cast(torch.distributed.ProcessGroup, group)


def expert_dp_group() -> torch.distributed.ProcessGroup:
    """The ranks that hold the same experts."""
    return cast(torch.distributed.ProcessGroup, parallel_state.get_expert_data_parallel_group())


def destroy() -> None:
    """Leave all groups (tests run several layouts in one process)."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
