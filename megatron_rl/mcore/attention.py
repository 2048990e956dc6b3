"""Causal attention over packed sequences: Megatron's core_attention slot, RoPE included.

Megatron's own rotary code splits a packed batch in Python, per layer, and synchronises the device; here cosines and
sines are computed once a micro-batch (packing.py) and applied to all tokens at once.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.mcore.packing import Packed
from megatron_rl.mcore.sinks import flash_with_sinks
from megatron_rl.models.rope import Rotation
from megatron_rl.ops.flash import Flash, torch_flash
from megatron_rl.ops.rotary import rotate


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: Packed,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """SDPA over padded groups of like length. q [t, heads, d], k and v [cp t, kv_heads, d] -> [t, heads, d].

    Causality keeps pads, which lie right of the real tokens, out of every real token's sight. window: keys that a query
    sees, its own among them; 0: all. sinks: [heads] a further logit of each head, whose value is 0; None: none.
    """
    outputs = []
    for group in packed.groups:
        q, mask = query[group.query_index].transpose(1, 2), group.masks[window]
        k, v = (x[group.key_index].transpose(1, 2) for x in (key, value))
        if sinks is not None:
            q, k, v, mask = with_sink_key(q, k, v, mask, sinks / scale)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        outputs.append(out[..., : value.shape[-1]].transpose(1, 2).flatten(0, 1)[group.real])
    return torch.cat(outputs)[packed.inverse]


def with_sink_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One more key that every query sees, with the value 0 and for each query head a logit of its own.

    q [b, heads, q, d], k and v [b, kv_heads, k, d], mask [b, 1, q, k] or None for causality; logits: [heads] before the
    scale. The heads that share a key head get as many further dims, one each: a query is 1 in its head's, the new key
    has the heads' logits there, and other keys are 0. So no head needs a mask of its own.
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys, sharing = key.shape[1], key.shape[2], heads // key.shape[1]
    own = torch.eye(sharing, dtype=query.dtype, device=query.device).repeat(kv_heads, 1)
    query = torch.cat([query, own[None, :, None].expand(batch, -1, num_queries, -1)], dim=-1)
    key = torch.nn.functional.pad(key, (0, sharing, 0, 1))
    column = logits.to(key.dtype).view(1, kv_heads, sharing).expand(batch, -1, -1)
    filled = torch.nn.functional.pad(column, (key.shape[-1] - sharing, 0))[:, :, None]
    key = key + torch.nn.functional.pad(filled, (0, 0, num_keys, 0))
    value = torch.nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1], 0, 1))
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()[None, None]
    return query, key, value, torch.nn.functional.pad(mask, (0, 1), value=True)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: Packed,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    *,
    flash: Flash = torch_flash,
) -> torch.Tensor:
    """Variable-length flash attention (CUDA, half precision). Arguments as grouped_attention; flash: the kernel."""
    # Flash attention takes values as wide as keys; those of latent attention are narrower.
    width, lacking = value.shape[-1], key.shape[-1] - value.shape[-1]
    value = torch.nn.functional.pad(value, (0, lacking)) if lacking else value
    if sinks is not None:
        return flash_with_sinks(query, key, value, sinks, packed, scale, window)[..., :width]
    return flash(query, key, value, packed.lens, scale, window)[..., :width]


class PackedAttention(MegatronModule):
    """Core attention for packed sequences; flash attention on CUDA in half precision, padded SDPA elsewhere.

    layer_number: of all layers of the model, from 1. windows: of ModelShape.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: object,
        softmax_scale: float | None = None,
        windows: tuple[int, ...] = (),
        rotation: Rotation | None = None,
        sinks: bool = False,
        **__: object,
    ) -> None:
        """rotation: RoPE that turns queries and keys here; None: they come turned. sinks: each head has one."""
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.softmax_offset = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            # Each rank has its own heads': all of them count in the gradient's norm.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.rotation = rotation
        self.flash: Flash = torch_flash
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.window = windows[layer_number - 1] if windows else 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_: object,
        packed_seq_params: Packed | None = None,
        **__: object,
    ) -> torch.Tensor:
        """q [t, heads, d], k and v [t, kv_heads, d] -> [t, heads * d]."""
        packed = packed_seq_params
        assert isinstance(packed, Packed), "sequences come packed (mcore.packing.pack)"
        if self.rotation is not None:
            query, key = rotate(query, key, *packed.rotary[self.rotation])
        if packed.kv_group is not None:
            # Forward gathers along the tokens, backward adds the gradients up and hands each rank its part.
            key, value = (gather_from_sequence_parallel_region(x, True, packed.kv_group) for x in (key, value))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and packed.kv_group is None:
            attend = partial(varlen_attention, flash=self.flash)
        else:
            attend = grouped_attention
        return attend(query, key, value, packed, self.scale, self.window, self.softmax_offset).flatten(1)


def use_flash(chunk: torch.nn.Module, flash: Flash) -> None:
    """Give a model chunk's attention this kernel."""
    for module in chunk.modules():
        if isinstance(module, PackedAttention):
            module.flash = flash
