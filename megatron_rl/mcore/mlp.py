"""A dense layer's gated MLP, its activation fused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from megatron_rl.ops.gated import swiglu


class SwigluMLP(MLP):
    """down(silu(gate) * up) without biases: Megatron's MLP, whose own fused activations need its extensions."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        """[t, 1, h] -> the same shape; and no bias."""
        rows, bias = self.linear_fc1(hidden_states)
        assert bias is None and self.config.activation_func is torch.nn.functional.silu
        return self.linear_fc2(swiglu(rows))[0], None


def fused_mlp(mlp: Any) -> Any:
    """The spec of a dense layer's MLP with SwigluMLP in it: megatron-core 0.19 has a function in place of a spec."""
    if isinstance(mlp, partial):
        return partial(SwigluMLP.as_mlp_submodule, **mlp.keywords)  # type: ignore[attr-defined]
    mlp.module = SwigluMLP
    return mlp
