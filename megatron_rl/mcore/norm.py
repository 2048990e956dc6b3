"""RMSNorm for Megatron's module specs, the same on CPU and CUDA."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019), over the last dim.

    With sequence parallelism each rank sees a part of the tokens, so the weight's gradient is a partial sum; the
    `sequence_parallel` mark tells Megatron's finalize_model_grads to add the parts.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype; the mean square is taken in float32."""
        return nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), as Gemma has it (Gemma Team 2024): a weight of 0 changes nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype; all is computed in float32."""
        normed = nn.functional.rms_norm(hidden.float(), (hidden.shape[-1],), 1.0 + self.weight.float(), self.eps)
        return normed.to(hidden.dtype)
