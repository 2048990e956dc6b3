"""This rank's parameters, keyed as in reshard plans: chunk{c}.{name}."""

from __future__ import annotations

import torch

from megatron_rl.mcore.build import Model


def parameters(model: Model) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter of this rank. The objects stay the same when their memory is moved."""
    return {
        f"chunk{number}.{name}": param
        for number, chunk in enumerate(model.bare_chunks)
        for name, param in chunk.named_parameters()
    }
