"""Floating-point operations of training, as a model's arithmetic has them. Pure.

Counted are matrix products, 2 operations a multiplication with its addition, and attention over the tokens that a query
sees. A backward pass counts twice a forward pass. What is computed again (activations, the head's logits) is not
counted: the share of a device's peak that comes of it is the model FLOP utilisation (Chowdhery et al. 2022, PaLM).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from megatron_rl.models.rules import Family
from megatron_rl.models.shape import ModelShape

DENSE_BF16 = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12}
"""Part of a device's name -> operations a second of dense products in bfloat16, as its maker states them."""


def peak_of(device_name: str) -> float | None:
    """Operations a second of a device; None if it is not in the table."""
    return next((peak for part, peak in DENSE_BF16.items() if part in device_name), None)


def training_flops(
    shape: ModelShape, family: Family, lengths: Sequence[int], predicted: int, *, frozen: bool = False
) -> float:
    """Forward and backward over sequences of these lengths, of which `predicted` tokens have a loss. frozen: weights
    have no gradients (LoRA, whose own products are small).
    """
    passes = 2 if frozen else 3
    tokens = sum(lengths)
    products = 2.0 * predicted * shape.hidden_size * shape.vocab_size
    attention = 0.0
    for layer in range(shape.num_layers):
        for rule in family.layer(shape, layer):
            copies = shape.num_experts_per_tok if rule.expert else 1
            products += 2.0 * tokens * copies * sum(prod(size) for size in rule.layout.sizes(shape) if len(size) > 1)
        window = shape.windows[layer] if shape.windows else 0
        attention += 2.0 * _widths(shape) * sum(_pairs(length, window) for length in lengths)
    return passes * products + 3 * attention


def _widths(shape: ModelShape) -> int:
    """Numbers of all heads that a query's product with a key, and with a value, takes."""
    latent = shape.latent
    each = 2 * shape.head_dim if latent is None else latent.nope_dim + latent.rope_dim + latent.value_dim
    return shape.num_heads * each


def _pairs(length: int, window: int) -> int:
    """Queries with the keys that they see, in a sequence."""
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
