"""What this rank's model holds, by the names of reshard plans: parameter p of chunk c is chunk{c}.{p}."""

from __future__ import annotations

import torch

from megatron_rl.mcore.build import Policy


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
