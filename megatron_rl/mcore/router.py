"""Which experts a token goes to, and how much each counts: Megatron's router slot.

Megatron's own choice differs where a family limits a token to groups of experts (it adds up more scores of a group
than DeepSeek-V2 does), and it always scales sigmoid scores to sum to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.mcore.routing import Routing
from megatron_rl.models.shape import Router

_TINY = 1e-20
"""Added to a sum of sigmoids that weights are divided by, as transformers and vLLM do"""


def chosen_experts(scores: torch.Tensor, router: Router, topk: int) -> torch.Tensor:
    """[t, topk] int64: each token's experts. scores: [t, experts] of the choice, with the bias where there is one."""
    if router.groups > 1:
        of_groups = scores.unflatten(1, (router.groups, -1))
        best = of_groups.topk(2, dim=-1).values.sum(-1) if router.bias else of_groups.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept = kept.scatter(1, best.topk(router.groups_per_token, dim=1).indices, True)
        scores = of_groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    return scores.topk(topk, dim=1).indices


def expert_weights(logits: torch.Tensor, chosen: torch.Tensor, router: Router, *, normed: bool) -> torch.Tensor:
    """[t, topk] float32: how much each of a token's experts counts. normed: they sum to 1 before the scale."""
    if router.score == "softmax":
        # Softmax over the chosen experts alone equals softmax over all, scaled to sum to 1 over the chosen.
        weights = logits.gather(1, chosen).softmax(-1) if normed else logits.softmax(-1).gather(1, chosen)
    else:
        weights = logits.gather(1, chosen).sigmoid()
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY) if normed else weights
    return weights * router.scale


class RoutedLayer(TransformerLayer):
    """A layer with experts, whose router is told which micro-batch passes: in the forward pass, and when the layer is
    computed again for the backward pass of an earlier micro-batch.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        router: Any = self.mlp.router
        router.now = kwargs["packed_seq_params"].routing
        return super().forward(*args, **kwargs)


class ExpertRouter(TopKRouter):
    """Megatron's router with the choice and the weights of the model's family.

    expert_bias: [experts] float32, whatever precision the model has. It is loaded, and no update changes it. now: what
    routers note and replay of the micro-batch that passes (set by RoutedLayer); None: nothing.
    """

    def __init__(self, config: TransformerConfig, *args: Any, router: Router, normed: bool, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.choice, self.normed = router, normed
        self.now: Routing | None = None
        if router.bias:
            del self.expert_bias
            zeros = torch.zeros(self.weight.shape[0], dtype=torch.float32)
            self.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertRouter:
        super()._apply(fn, recurse)
        self._maintain_float32_expert_bias()
        return self

    def routing(self, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """[.., experts] float32 logits -> [t, experts] weights, 0 for experts not chosen, and bool whether chosen."""
        logits = logits.view(-1, logits.shape[-1])
        with torch.no_grad():
            scores = logits if self.choice.score == "softmax" else logits.sigmoid()
            scores = scores if self.expert_bias is None else scores + self.expert_bias
            chosen = chosen_experts(scores, self.choice, self.topk)
        if self.now is None:
            weights = expert_weights(logits, chosen, self.choice, normed=self.normed)
        else:
            assert self.layer_number is not None
            layer, probs = self.layer_number - 1, self.now.probs(logits, self.choice.score)
            chosen = self.now.choose(layer, chosen, probs)
            weights = expert_weights(logits, chosen, self.choice, normed=self.normed)
            weights = self.now.balanced(layer, weights, probs)
        return (
            torch.zeros_like(logits).scatter(1, chosen, weights),
            torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True),
        )
