"""Sizes of published models, as families list them for `megatron-rl plan`: the numbers of each model's config.json."""

from __future__ import annotations

from megatron_rl.models.shape import ModelShape


def known(
    architecture: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    experts: tuple[int, int] = (0, 0),
) -> ModelShape:
    """The shape of a published model. experts: of a layer, and of a token. What decides no tensor has any value."""
    return ModelShape(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=32768,
        initializer_range=0.02,
        num_experts=experts[0],
        num_experts_per_tok=experts[1],
        norm_topk_prob=experts[0] > 0,
    )
