"""The experts of a layer as two stacks: one parameter a projection, as vLLM has them, in Megatron's MoE layer.

Megatron's SequentialMLP has a module and two parameters for each expert: with 128 of them, 256 small products a layer.
Its grouped ones need Transformer Engine, or an extension. A stack is one product on a GPU (torch's grouped product) and
can be the very memory of the engine's w13 and w2.
"""

from __future__ import annotations

import torch
from megatron.core.parallel_state import get_expert_tensor_parallel_rank
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megatron_rl.models.fields import ClampedGate

# Rows of torch's grouped product begin at multiples of 16 bytes.
_ALIGNED = 8


class ExpertStack(torch.nn.Module):
    """A linear map for each of this rank's experts: weight [experts, out, in], and a bias [experts, out] or none."""

    def __init__(
        self, count: int, out: int, width: int, config: TransformerConfig, split_dim: int, bias: bool = False
    ) -> None:
        """split_dim: the dim of the weight that the experts' tensor parallelism splits; if 2, outputs are added up."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(count, out, width, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(count, out, dtype=config.params_dtype)) if bias else None
        parts = config.expert_tensor_parallel_size or 1
        self.added_by = parts if split_dim == 2 else 1
        # Megatron reads the marks: over which ranks gradients are added up, and whose numbers count in the norm.
        for param in self.parameters():
            vars(param)["allreduce"] = config.expert_model_parallel_size == 1
        set_tensor_model_parallel_attributes(self.weight, True, split_dim, 1)
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, True, 1, 1)
            # Each of the ranks that add up has all of the bias, and the first one's counts.
            self.bias.shared = self.added_by > 1 and get_expert_tensor_parallel_rank() > 0  # type: ignore[attr-defined]

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[t, in] -> [t, out] without the bias. counts: rows of each expert, which lie one after the other."""
        size, aligned = rows.shape[0], not any(width % _ALIGNED for width in self.weight.shape[1:])
        if rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and size:
            return grouped_linear(rows, self.weight, counts)
        return sequential_linear(rows, self.weight, counts)

    def bias_of(self, counts: list[int]) -> torch.Tensor:
        """[t, out] each row's bias, or the part of it that this rank adds; with the gradient of all of it."""
        assert self.bias is not None
        part = self.bias
        if self.added_by > 1:
            # Every rank that adds up has the same gradient, so that the copies stay alike.
            part = (part - part.detach()) + part.detach() / self.added_by
        repeats = torch.tensor(counts).to(part.device, non_blocking=True)
        return part.repeat_interleave(repeats, dim=0, output_size=sum(counts))


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
    """This rank's experts: gated MLPs. Takes the place of SequentialMLP."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, gate: ClampedGate | None = None, bias: bool = False,
        **_: object,
    ) -> None:  # fmt: skip
        """gate: what they compute in place of activation(gate) * up. bias: both of their projections add one."""
        super().__init__(config=config)
        assert config.gated_linear_unit, "only gated experts are stacked"
        assert config.moe_ffn_hidden_size is not None and config.expert_tensor_parallel_size is not None
        # The experts' own tensor parallelism; ranks of expert parallelism hold other experts.
        inner = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.linear_fc1 = ExpertStack(num_local_experts, 2 * inner, config.hidden_size, config, 1, bias)
        self.linear_fc2 = ExpertStack(num_local_experts, config.hidden_size, inner, config, 2, bias)
        self.gate, self.has_bias = gate, bias

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """[t, h] -> [t, h], each row weighted by its probability [t]; and no bias to add later. tokens_per_expert: [E]
        rows, which lie expert after expert. With a split of experts, the dispatcher adds the parts up.
        """
        counts: list[int] = tokens_per_expert.tolist()
        inner = self.linear_fc1(rows, counts)
        inner = self._gated(inner + self.linear_fc1.bias_of(counts) if self.has_bias else inner)
        probs = probs.unsqueeze(-1)
        inner = (inner * probs).to(inner.dtype)
        out = self.linear_fc2(inner, counts)
        return (out + (self.linear_fc2.bias_of(counts) * probs).to(out.dtype) if self.has_bias else out), None

    def _gated(self, rows: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            return clamped(rows, self.gate)
        gate, up = rows.chunk(2, dim=-1)
        return self.config.activation_func(gate) * up


def clamped(rows: torch.Tensor, of: ClampedGate) -> torch.Tensor:
    """[.., 2 f] -> [.., f]: see ClampedGate."""
    gate, up = rows[..., 0::2].clamp(max=of.limit), rows[..., 1::2].clamp(min=-of.limit, max=of.limit)
    return gate * (of.gain * gate).sigmoid() * (up + 1.0)
