"""The choice and the weights of a token's experts, against transformers' routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.mcore.router import chosen_experts, expert_weights
from megatron_rl.models.shape import Router

EXPERTS, TOPK, HIDDEN = 16, 4, 8


def dense(chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[t, experts] weights, 0 for experts that were not chosen."""
    return torch.zeros(len(chosen), EXPERTS).scatter(1, chosen, weights.detach())


def ours(logits: torch.Tensor, router: Router, bias: torch.Tensor | None, normed: bool) -> torch.Tensor:
    scores = logits if router.score == "softmax" else logits.sigmoid()
    chosen = chosen_experts(scores if bias is None else scores + bias, router, TOPK)
    return dense(chosen, expert_weights(logits, chosen, router, normed=normed))


def theirs(name: str, bias: torch.Tensor | None, **fields: Any) -> Any:
    """A router of transformers, with random weights and the given bias."""
    import transformers
    from transformers.models import deepseek_v2, deepseek_v3, glm4_moe, qwen3_moe

    modules = {
        "DeepseekV2": deepseek_v2.modeling_deepseek_v2,
        "DeepseekV3": deepseek_v3.modeling_deepseek_v3,
        "Glm4Moe": glm4_moe.modeling_glm4_moe,
        "Qwen3Moe": qwen3_moe.modeling_qwen3_moe,
    }
    config = getattr(transformers, f"{name}Config")(
        hidden_size=HIDDEN, num_attention_heads=4, num_experts_per_tok=TOPK, **fields
    )
    kind = f"{name}TopKRouter" if name == "Qwen3Moe" else f"{name}TopkRouter"
    gate = getattr(modules[name], kind)(config)
    torch.nn.init.normal_(gate.weight, std=1.0)
    if bias is not None:
        gate.e_score_correction_bias.copy_(bias)
    return gate


CASES = [
    ("Qwen3Moe", Router(), True, {"num_experts": EXPERTS, "norm_topk_prob": True}),
    ("Qwen3Moe", Router(), False, {"num_experts": EXPERTS, "norm_topk_prob": False}),
    (
        "DeepseekV2", Router(scale=1.5, groups=4, groups_per_token=2), False,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    ("DeepseekV2", Router(scale=0.7), False, {"topk_method": "greedy"}),
    (
        "DeepseekV3", Router("sigmoid", scale=2.5, groups=4, groups_per_token=2, bias=True), True,
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    (
        "DeepseekV3", Router("sigmoid", scale=2.5, bias=True), False,
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
    ),
    ("Glm4Moe", Router("sigmoid", scale=1.3, bias=True), True, {"routed_scaling_factor": 1.3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "router", "normed", "fields"), CASES)
def test_experts_and_weights_are_those_of_transformers(
    name: str, router: Router, normed: bool, fields: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    if name != "Qwen3Moe":
        fields = {"n_routed_experts": EXPERTS, "routed_scaling_factor": router.scale} | fields
    # Large enough that the choice by score and the choice by score and bias differ.
    bias = torch.randn(EXPERTS) if router.bias else None
    gate = theirs(name, bias, **fields)
    hidden = torch.randn(200, HIDDEN)
    _, weights, chosen = gate(hidden)
    logits = torch.nn.functional.linear(hidden, gate.weight).detach()
    assert torch.allclose(ours(logits, router, bias, normed), dense(chosen, weights), rtol=1e-6, atol=1e-7)
    if router.bias:
        assert not torch.allclose(ours(logits, router, None, normed), dense(chosen, weights), atol=1e-2)
    if router.groups > 1:
        scores = logits.sigmoid() if router.bias else logits
        groups = chosen_experts(scores, router, TOPK) // (EXPERTS // router.groups)
        assert all(len(row.unique()) <= router.groups_per_token for row in groups)
