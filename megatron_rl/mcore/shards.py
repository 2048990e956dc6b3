"""What this rank's model holds, by the names of reshard plans: parameter p of chunk c is chunk{c}.{p}."""

from __future__ import annotations

import torch

from megatron_rl.mcore.build import Model


def parameters(model: Model) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by these names. They stay the same objects when their memory is moved."""
    return {
        f"chunk{number}.{name}": param
        for number, chunk in enumerate(model.bare_chunks)
        for name, param in chunk.named_parameters()
    }


def live_parameters(model: Model) -> dict[str, torch.Tensor]:
    """The memory that these have now, not copies; Model.complete_params makes them whole first."""
    return {name: param.detach() for name, param in parameters(model).items()}
