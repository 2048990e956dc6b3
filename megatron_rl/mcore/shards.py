"""What each rank's model holds, as reshard plans name it: parameter p of chunk c is chunk{c}.{p}."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.mcore.build import Policy
from megatron_rl.mcore.convert import chunk_params
from megatron_rl.parallel.topology import topology_of
from megatron_rl.reshard.plan import Shard


def trainer_shards(policy: Policy, world: int) -> list[Shard]:
    """The parameters of all `world` ranks, with the heads that the policy has; equal on all of them."""
    parallel = policy.parallel
    topology = topology_of(parallel, world)
    shards: list[Shard] = []
    for rank in range(world):
        at, expert = topology.coords(rank), topology.expert_coords(rank)
        params = [
            replace(param, name=f"chunk{chunk}.{param.name}")
            for chunk in range(parallel.vpp)
            for param in chunk_params(policy, at.pp, chunk, at.tp, expert.ep * parallel.expert_tp + expert.etp)
        ]
        shards.append(Shard(rank, tuple(params)))
    return shards


def parameters(policy: Policy) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by these names. They stay the same objects when their memory is moved."""
    return {
        f"chunk{chunk}.{name}": param
        for chunk, model in enumerate(policy.models)
        for name, param in model.named_parameters()
    }


def live_parameters(policy: Policy) -> dict[str, torch.Tensor]:
    """The memory that these have now, not copies; Policy.complete_params makes them whole first."""
    return {name: param.detach() for name, param in parameters(policy).items()}
