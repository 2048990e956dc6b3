"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2") over packed sequences, in Megatron's attention slot.

Megatron's own splits the small down projections over tensor-parallel ranks, which neither checkpoints nor vLLM do, and
turns packed sequences one by one. Here they are whole on every rank; the parameters have Megatron's names.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.mcore.attention import PackedAttention
from megatron_rl.mcore.norm import RMSNorm
from megatron_rl.mcore.packing import Packed
from megatron_rl.models.rope import Rotation
from megatron_rl.models.shape import Latent
from megatron_rl.ops.rotary import apply_rotary


class WholeLinear(torch.nn.Module):
    """A linear map without a bias that every tensor-parallel rank holds whole: [.., width] -> [.., out].

    With sequence parallelism each rank sees a part of the tokens, so the weight's gradient is a partial sum; the
    `sequence_parallel` mark tells Megatron's finalize_model_grads to add the parts.
    """

    def __init__(self, config: TransformerConfig, width: int, out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out, width, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.weight)


class LatentAttention(MegatronModule):
    """Queries, keys and values of all heads are made from two short vectors a token. A part of each head's query turns
    with the position, and so does one key for all heads; checkpoints have the numbers of a pair side by side.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, latent: Latent, rotation: Rotation, **_: object
    ) -> None:
        """rotation: RoPE of the layer."""
        super().__init__(config=config)
        assert config.init_method is not None
        heads, width = config.num_attention_heads, config.hidden_size
        query_size = heads * (latent.nope_dim + latent.rope_dim)
        self.latent, self.rotation = latent, rotation
        self.local_heads = heads // config.tensor_model_parallel_size
        split = partial(
            ColumnParallelLinear, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        if latent.q_rank:
            self.linear_q_down_proj = WholeLinear(config, width, latent.q_rank)
            self.q_layernorm = RMSNorm(config, latent.q_rank, latent.norm_eps)
            self.linear_q_up_proj = split(latent.q_rank, query_size)
        else:
            self.linear_q_proj = split(width, query_size)
        self.linear_kv_down_proj = WholeLinear(config, width, latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, latent.norm_eps)
        self.linear_kv_up_proj = split(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
        scale = rotation.rope.softmax_factor * (latent.nope_dim + latent.rope_dim) ** -0.5
        self.core_attention = PackedAttention(config, layer_number, softmax_scale=scale)
        self.linear_proj = RowParallelLinear(
            heads * latent.value_dim, width, config=config, init_method=config.init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True,
        )  # fmt: skip
        self.recompute_attention = config.recompute_granularity == "selective"

    def forward(
        self, hidden: torch.Tensor, *_: object, packed_seq_params: Packed | None = None, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[t, 1, h] -> [t, 1, h] and no bias; t / tp tokens with sequence parallelism."""
        packed = packed_seq_params
        assert isinstance(packed, Packed), "sequences come packed (mcore.packing.pack)"
        query, key, value = self._heads(hidden, packed)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self.core_attention(query, key, value, packed_seq_params=packed)

        if self.recompute_attention and self.training:
            out = checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        assert isinstance(out, torch.Tensor)
        return self.linear_proj(out[:, None])

    def _heads(self, hidden: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's heads of all tokens: queries and keys [t, heads, nope + rope], values [t, heads, value]."""
        latent, (cos, sin) = self.latent, packed.rotary[self.rotation]
        if latent.q_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        else:
            query, _ = self.linear_q_proj(hidden)
        query = query.view(query.shape[0], self.local_heads, -1)
        short, turning = self.linear_kv_down_proj(hidden).split([latent.kv_rank, latent.rope_dim], dim=-1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(short))
        key, value = both.view(both.shape[0], self.local_heads, -1).split([latent.nope_dim, latent.value_dim], dim=-1)
        group = get_tensor_model_parallel_group()
        # Each rank's heads give this key a gradient of their own: backward adds them up over the ranks.
        if self.config.sequence_parallel:
            turning = gather_from_sequence_parallel_region(turning, True, group)
        else:
            turning = copy_to_tensor_model_parallel_region(turning, group)
        still, turned = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        query = torch.cat([still, apply_rotary(halves(turned), cos, sin)], dim=-1)
        turned = apply_rotary(halves(turning), cos, sin).expand(-1, self.local_heads, -1)
        return query, torch.cat([key, turned], dim=-1), value


def halves(pairs: torch.Tensor) -> torch.Tensor:
    """[.., d] numbers of pairs side by side -> all first numbers, then all second ones, as apply_rotary takes them."""
    return torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1)
