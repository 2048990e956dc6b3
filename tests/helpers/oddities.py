"""Sizes that only some families have, for shapes that are not read from a config.json."""

from __future__ import annotations

from typing import Any

from megatron_rl.models import FAMILIES
from megatron_rl.models.shape import Latent, Router

BIASED = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
COMPRESSED = ("DeepseekV3ForCausalLM",)
"""Families that compress their queries too"""


def oddities(architecture: str, layers: int, ffn: int) -> dict[str, Any]:
    """Fields of ModelShape: the first half of the layers is dense, all experts have a shared one beside them."""
    if FAMILIES[architecture].compute.shared_gate:
        return {"plain_layers": tuple(range(0, layers, 2)), "dense_ffn_size": 2 * ffn, "shared_ffn_size": ffn}
    if "first_k_dense_replace" not in FAMILIES[architecture].fields.needed:
        return {}
    biased = architecture in BIASED
    router = Router("sigmoid" if biased else "softmax", scale=1.5, bias=biased)
    sizes: dict[str, Any] = {
        "dense_layers": layers // 2, "dense_ffn_size": 2 * ffn, "shared_ffn_size": ffn, "router": router,
    }  # fmt: skip
    if "kv_lora_rank" in FAMILIES[architecture].fields.needed:
        q_rank = 3 if architecture in COMPRESSED else 0
        sizes["latent"] = Latent(q_rank=q_rank, kv_rank=2, nope_dim=2, rope_dim=2, value_dim=3)
    return sizes
