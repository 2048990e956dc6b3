"""A dense layer's gated MLP, its activation fused."""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP

from megatron_rl.ops.gated import swiglu


class SwigluMLP(MLP):
    """down(silu(gate) * up) without biases: Megatron's MLP, whose own fused activations need its extensions."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        """[t, 1, h] -> the same shape; and no bias."""
        rows, bias = self.linear_fc1(hidden_states)
        assert bias is None
        return self.linear_fc2(swiglu(rows))[0], None


def fuse_activations(chunk: torch.nn.Module) -> None:
    """Dense layers' MLPs of a model chunk become SwigluMLPs if they compute SwiGLU. Experts have other classes.

    Once they are built: megatron-core 0.16 warns of specs with a class that it does not know, 0.19 has other specs.
    """
    for module in chunk.modules():
        if type(module) is MLP and module.config.activation_func is torch.nn.functional.silu:
            assert module.config.gated_linear_unit and not module.config.add_bias_linear
            module.__class__ = SwigluMLP
