"""Shapes of well-known models by name, for planning without a download: `megatron-rl plan --model qwen2.5/7b`.

The numbers are those of each model's published config.json.
"""

from __future__ import annotations

import difflib

from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models.shape import ARCHITECTURES, ModelShape

DEEPSEEK_V3 = "deepseek-v3/671b"
"""Known to the planner alone: it has a table of its own (reshard/planning/tables.py)."""

# family -> (architecture, head_dim or None for hidden / heads, size -> (hidden, layers, heads, KV heads, inner, vocab,
# tied)); (experts, experts of a token) follow for models with experts.
_Size = tuple[int, int, int, int, int, int, bool]
_FAMILIES: dict[str, tuple[str, int | None, dict[str, _Size]]] = {
    "qwen2.5": (
        "Qwen2ForCausalLM",
        None,
        {
            "0.5b": (896, 24, 14, 2, 4864, 151936, True),
            "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
            "3b": (2048, 36, 16, 2, 11008, 151936, True),
            "7b": (3584, 28, 28, 4, 18944, 152064, False),
            "14b": (5120, 48, 40, 8, 13824, 152064, False),
            "32b": (5120, 64, 40, 8, 27648, 152064, False),
            "72b": (8192, 80, 64, 8, 29568, 152064, False),
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        128,
        {
            "0.6b": (1024, 28, 16, 8, 3072, 151936, True),
            "1.7b": (2048, 28, 16, 8, 6144, 151936, True),
            "4b": (2560, 36, 32, 8, 9728, 151936, True),
            "8b": (4096, 36, 32, 8, 12288, 151936, False),
            "14b": (5120, 40, 40, 8, 17408, 151936, False),
            "32b": (5120, 64, 64, 8, 25600, 151936, False),
            "30b-a3b": (2048, 48, 32, 4, 768, 151936, False),
            "235b-a22b": (4096, 94, 64, 4, 1536, 151936, False),
        },
    ),
    "llama3.1": (
        "LlamaForCausalLM",
        None,
        {
            "8b": (4096, 32, 32, 8, 14336, 128256, False),
            "70b": (8192, 80, 64, 8, 28672, 128256, False),
        },
    ),
    "mixtral": ("MixtralForCausalLM", None, {"8x7b": (4096, 32, 32, 8, 14336, 32000, False)}),
}
_EXPERTS: dict[str, tuple[str, int, int]] = {
    "qwen3/30b-a3b": ("Qwen3MoeForCausalLM", 128, 8),
    "qwen3/235b-a22b": ("Qwen3MoeForCausalLM", 128, 8),
    "mixtral/8x7b": ("MixtralForCausalLM", 8, 2),
}
"""Models with experts: architecture, experts of a layer, experts of a token."""

MODEL_NAMES: tuple[str, ...] = (
    *(f"{family}/{size}" for family, (_, _, sizes) in _FAMILIES.items() for size in sizes),
    DEEPSEEK_V3,
)


def named_shape(name: str, key: str = "model") -> ModelShape | None:
    """The shape of a model of MODEL_NAMES, in any case; None for DEEPSEEK_V3, which has none.

    Raises ConfigError with the nearest names where there is no such one.
    """
    name = name.lower()
    if name == DEEPSEEK_V3:
        return None
    if name not in MODEL_NAMES:
        close = difflib.get_close_matches(name, MODEL_NAMES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        cure = f"{hint}known: {', '.join(MODEL_NAMES)}; or give a folder with a config.json"
        raise ConfigError([Fault(key, name, "is no folder, no config.json and no known model", cure)])
    family, _, size = name.partition("/")
    architecture, head_dim, sizes = _FAMILIES[family]
    hidden, layers, heads, kv_heads, inner, vocab, tied = sizes[size]
    architecture, experts, per_token = _EXPERTS.get(name, (architecture, 0, 0))
    kind = ARCHITECTURES[architecture]
    return ModelShape(
        architecture=architecture, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim, ffn_size=inner, vocab_size=vocab,
        tie_word_embeddings=tied, qkv_bias=kind.qkv_bias, rms_norm_eps=kind.rms_norm_eps, rope_theta=kind.rope_theta,
        max_position_embeddings=32768, initializer_range=0.02, qk_norm=kind.qk_norm, num_experts=experts,
        num_experts_per_tok=per_token, norm_topk_prob=experts > 0,
    )  # fmt: skip
