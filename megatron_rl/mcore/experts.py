"""The experts of a layer as two stacks: one parameter a projection, as vLLM has them, in Megatron's MoE layer.

Megatron's SequentialMLP has a module and two parameters for each expert: with 128 of them, 256 small products a layer.
Its grouped ones need Transformer Engine, or an extension. A stack is one product on a GPU (torch's grouped product) and
can be the very memory of the engine's w13 and w2.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

# Rows of torch's grouped product begin at multiples of 16 bytes.
_ALIGNED = 8


class ExpertStack(torch.nn.Module):
    """A linear map for each of this rank's experts, without biases: weight [experts, out, in]."""

    def __init__(self, count: int, out: int, width: int, config: TransformerConfig, split_dim: int) -> None:
        """split_dim: the dim that ranks of the experts' tensor parallelism share."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(count, out, width, dtype=config.params_dtype))
        # Megatron reads both marks: over which ranks gradients are added up, and whose numbers count in the norm.
        vars(self.weight)["allreduce"] = config.expert_model_parallel_size == 1
        set_tensor_model_parallel_attributes(self.weight, True, split_dim, 1)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[t, in] -> [t, out]. counts: rows of each expert, which lie one after the other."""
        size, aligned = rows.shape[0], not any(width % _ALIGNED for width in self.weight.shape[1:])
        if rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and size:
            return grouped_linear(rows, self.weight, counts)
        return sequential_linear(rows, self.weight, counts)


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[t, in], [E, out, in] -> [t, out] by one product; counts[e] rows are those of expert e."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
    return functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def sequential_linear(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """What grouped_linear computes, expert after expert, in any dtype. An expert without rows has the gradient 0."""
    # unbind: an index for each expert would add up as many gradients of the whole stack.
    parts = zip(rows.split(counts), weight.unbind(), strict=True)
    return torch.cat([functional.linear(part, one) for part, one in parts])


class StackedExperts(MegatronModule):
    """This rank's experts: gated MLPs without biases. Takes the place of SequentialMLP."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: object) -> None:
        super().__init__(config=config)
        assert config.gated_linear_unit and not config.add_bias_linear, "only gated experts without biases are stacked"
        assert config.moe_ffn_hidden_size is not None and config.expert_tensor_parallel_size is not None
        # The experts' own tensor parallelism; ranks of expert parallelism hold other experts.
        inner = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.linear_fc1 = ExpertStack(num_local_experts, 2 * inner, config.hidden_size, config, 1)
        self.linear_fc2 = ExpertStack(num_local_experts, config.hidden_size, inner, config, 2)

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """[t, h] -> [t, h], each row weighted by its probability [t]; and no bias. tokens_per_expert: [E] rows, which
        lie expert after expert. With a split of experts, the dispatcher adds the parts up.
        """
        counts: list[int] = tokens_per_expert.tolist()
        inner = self._gated(self.linear_fc1(rows, counts))
        inner = (inner * probs.unsqueeze(-1)).to(inner.dtype)
        return self.linear_fc2(inner, counts), None

    def _gated(self, rows: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up, both clamped where the model says so."""
        config = self.config
        gate, up = rows.chunk(2, dim=-1)
        if (most := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=most), up.clamp(min=-most, max=most)
        return config.activation_func(gate) * (up + config.glu_linear_offset)
