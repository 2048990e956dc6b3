"""The sizes of a model. What they mean for its parameters, its family says (families/). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from megatron_rl.models.rope import Rope, Rotation


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024): ranks of the two compressions, and dims of a head.

    norm_eps: epsilon of the norms of compressed vectors; transformers has this one whatever rms_norm_eps is.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighted (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report").

    score: what turns a token's logits into scores, over all experts. bias: each expert's score gets a constant while
    experts are chosen, and not in their weights. groups: experts form that many groups of equal size, and a token's
    experts are of its groups_per_token best ones: by their two highest scores with a bias, by the highest without one.
    scale: factor on the weights.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide a transformer's tensors.

    ffn_size: inner size of the MLP, or of one expert. num_experts: of a layer with experts, 0 where there are none; a
    token goes to num_experts_per_tok of them, as the router says (norm_topk_prob: their weights are scaled to sum to 1,
    before the router's scale). dense_layers: first layers without experts; plain_layers: further ones,
    by number; their MLP has the inner size dense_ffn_size.
    shared_ffn_size: inner size of the MLP that all tokens pass beside their experts. further_layers: layers behind the
    model that predict further tokens, which are left out. rope: what is done to RoPE's
    frequencies. ropes: RoPE of each layer, if layers differ; (): that of rope_theta and rope in every layer.
    rotary_factor: share of a head that RoPE turns. windows: keys that a query of each layer sees, its own among them;
    0: all keys; (): all of them in every layer. query_pre_attn_scalar: the attention's logits are divided by its root;
    0: by that of head_dim. attention_bias, use_qk_norm: biases of queries, keys and values, and norms of heads, in
    families where config.json says (Compute says it of the others).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    initializer_range: float
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False
    dense_layers: int = 0
    plain_layers: tuple[int, ...] = ()
    dense_ffn_size: int = 0
    shared_ffn_size: int = 0
    further_layers: int = 0
    latent: Latent | None = None
    router: Router = field(default_factory=Router)
    rope: Rope = field(default_factory=Rope)
    ropes: tuple[Rotation, ...] = ()
    rotary_factor: float = 1.0
    windows: tuple[int, ...] = ()
    query_pre_attn_scalar: float = 0.0
    attention_bias: bool = False
    use_qk_norm: bool = False

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, by its global number, has experts in place of a plain MLP."""
        return self.num_experts > 0 and layer >= self.dense_layers and layer not in self.plain_layers

    def rotation(self, layer: int) -> Rotation:
        """RoPE of a layer, by its global number."""
        return self.ropes[layer] if self.ropes else Rotation(self.rope_theta, self.rope)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that RoPE turns: the first ones."""
        return int(self.head_dim * self.rotary_factor) if self.latent is None else self.latent.rope_dim

    def split_ffn_sizes(self) -> list[int]:
        """Inner sizes of the MLPs that tensor parallelism splits; experts have ranks of their own."""
        sizes = (0 if self.num_experts else self.ffn_size, self.dense_ffn_size, self.shared_ffn_size)
        return [size for size in sizes if size]

    def tp_choices(self) -> list[int]:
        """Tensor-parallel sizes that split heads, KV heads and the MLP (experts: see actor.etp) evenly, ascending."""
        common = gcd(self.num_heads, self.num_kv_heads, *self.split_ffn_sizes())
        return [tp for tp in range(1, common + 1) if common % tp == 0]
