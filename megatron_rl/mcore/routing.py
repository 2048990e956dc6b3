"""What routers did with a micro-batch, and what they are told: choices to repeat, statistics, a balancing loss.

Replay. Sampling and training compute a router's logits with other kernels, and near a tie another expert is chosen:
the token then passes another network, and its log-probability says nothing about the policy. So the choice that was
made in sampling ("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", Ma et al. 2025,
R3), or in the pass that measured the old log-probabilities, is made again. How much each chosen expert counts is
computed from the router's logits of now, so that routers go on learning.

Balancing loss (Fedus et al. 2021, Switch Transformers, eq. 4-6; over the whole mini-batch as in Qiu et al. 2025,
"Demons in the Detail"). With N tokens in the mini-batch, over all ranks and micro-batches, and k experts a token:

    L = coef * sum over layers of E * sum_i f_i P_i,    f_i = (tokens that chose i) / (k N),    P_i = (1/N) sum_t p_ti

f has no gradient, so that dL/dp_ti = coef * E * f_i / N: a sum over tokens, whatever micro-batch and rank they are in,
once f is known. A pass without gradients counts it before the update (it costs a forward pass). p_t: softmax over all
experts, or sigmoids scaled to sum to 1. With balanced experts L is coef for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.types import Metric

_EXTRA = 5
"""Columns behind those of the experts: tokens, entropy, and choices that were replayed, that differ, that none knew"""


@dataclass
class Routing:
    """The routers of one micro-batch on this rank: r tokens here (with sequence parallelism a part of the rank's)."""

    tokens: torch.Tensor
    """[r] int64 on the CPU: each one's place in the TrainBatch, -1 for padding"""
    real: torch.Tensor
    """[r] bool: those that are no padding"""
    replay: torch.Tensor | None = None
    """[r, layers, k] experts to choose, numbered from 1; 0 where none is known, and the router chooses"""
    records: bool = False
    """Keep what is chosen."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """layer -> [r, k] int64"""
    sums: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """layer -> [2 E + 5] float64: tokens of each expert, sums of each one's probability, and _EXTRA"""
    push: torch.Tensor | None = None
    """[layers, E] float32: the balancing loss's gradient of a token's probabilities"""

    def probs(self, logits: torch.Tensor, score: str) -> torch.Tensor:
        """[r, E] float32 probabilities that sum to 1, with a gradient where the balancing loss has one."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.push is not None):
            scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
            return scores if score == "softmax" else scores / scores.sum(-1, keepdim=True)

    def choose(self, layer: int, own: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """[r, k] the experts of each token. own: those that the router would choose. probs: [r, E]."""
        probs = probs.detach()
        chosen, known = own, None
        if self.replay is not None:
            given = self.replay[:, layer].long() - 1
            known = given[:, 0] >= 0
            chosen = torch.where(known[:, None], given, own)
        if self.records:
            self.chosen[layer] = chosen
        if layer not in self.sums:
            # A layer that is recomputed for its backward pass comes twice.
            self.sums[layer] = self._sums(own, chosen, known, probs)
        return chosen

    def _sums(
        self, own: torch.Tensor, chosen: torch.Tensor, known: torch.Tensor | None, probs: torch.Tensor
    ) -> torch.Tensor:
        # By products and not by picking rows: the host does not wait for the device.
        real, topk = self.real.double(), own.shape[1]
        counts = torch.zeros(probs.shape[1], dtype=torch.float64, device=probs.device)
        counts.index_add_(0, chosen.reshape(-1), real.repeat_interleave(topk, output_size=chosen.numel()))
        entropy = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
        extra = [real.sum(), (entropy * real).sum(), *torch.zeros(3, dtype=torch.float64, device=probs.device)]
        if known is not None:
            differs = (own[:, :, None] != chosen[:, None, :]).all(-1).sum(-1)
            replayed = real * known
            extra[2:] = [replayed.sum() * topk, (differs * replayed).sum(), (real - replayed).sum() * topk]
        return torch.cat([counts, (probs * real[:, None]).sum(0), torch.stack(extra)])

    def balanced(self, layer: int, weights: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """The weights as they are; their backward pass adds the balancing loss's gradient of probs [r, E]."""
        if self.push is None or not torch.is_grad_enabled():
            return weights
        return _WithGradient.apply(weights, probs, self.push[layer] * self.real[:, None])  # type: ignore[no-any-return]


class _WithGradient(torch.autograd.Function):
    """Hands its first argument on; the second one gets a gradient of its own."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, of: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gradient)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[no-untyped-def]
        return grad, ctx.saved_tensors[0], None


def router_sums(routings: Sequence[Routing], num_layers: int) -> torch.Tensor | None:
    """[layers, 2 E + 5] float64 sums over the micro-batches of all ranks, on the CPU; None for a model without experts.
    A collective over all ranks of the default group, each of which routes other tokens, or tokens of other layers.
    """
    if not routings:
        return None
    rows = [routing.sums for routing in routings]
    some = next((of_layer for of_micro in rows for of_layer in of_micro.values()), None)
    width = torch.zeros(1, dtype=torch.int64, device=routings[0].real.device)
    if some is not None:
        width += len(some)
    # A stage may have dense layers alone; its ranks come too, since the others wait for them.
    torch.distributed.all_reduce(width, op=torch.distributed.ReduceOp.MAX)
    total = torch.zeros(num_layers, int(width), dtype=torch.float64, device=width.device)
    for of_micro in rows:
        for layer, sums in of_micro.items():
            total[layer] += sums
    torch.distributed.all_reduce(total)
    return total.cpu()


def balance_gradient(sums: torch.Tensor, coef: float) -> torch.Tensor:
    """[layers, E] float32: coef * E * f_i / N of each layer; 0 in layers without experts. sums: router_sums."""
    counts, _, extra = _columns(sums)
    tokens = extra[:, 0]
    share = counts / counts.sum(1, keepdim=True).clamp_min(1.0)
    return (coef * counts.shape[1] * share / tokens.clamp_min(1.0)[:, None]).float()


def router_metrics(sums: torch.Tensor) -> dict[str, Metric]:
    """Of one optimizer step. router_load_max, router_load_mean: the fullest expert's tokens by the mean of all, of the
    worst layer and of the layers' mean. router_entropy: nats of a token in a layer. router_balance: the balancing loss
    of a layer with coefficient 1. router_changed: share of replayed choices that the router would not have made;
    router_unknown: share of choices that a replay did not know.
    """
    counts, probs, extra = _columns(sums[sums[:, -_EXTRA] > 0])
    if not len(counts):
        return {}
    tokens = extra[:, 0]
    load = counts.amax(1) / counts.mean(1)
    balance = counts.shape[1] * (counts / counts.sum(1, keepdim=True) * probs / tokens[:, None]).sum(1)
    metrics = {
        "router_load_max": Metric(float(load.max()), 1.0),
        "router_load_mean": Metric(float(load.mean()), 1.0),
        "router_entropy": Metric(float(extra[:, 1].sum()), float(tokens.sum())),
        "router_balance": Metric(float(balance.mean()), 1.0),
    }
    replayed, changed, unknown = (float(value) for value in extra[:, 2:].sum(0))
    if replayed or unknown:
        metrics["router_changed"] = Metric(changed, replayed)
        metrics["router_unknown"] = Metric(unknown, replayed + unknown)
    return metrics


def _columns(sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[layers, E] tokens, [layers, E] sums of probabilities, [layers, _EXTRA]."""
    num_experts = (sums.shape[1] - _EXTRA) // 2
    return sums.split([num_experts, num_experts, _EXTRA], dim=1)


def recorded(
    routings: Sequence[Routing], sizes: Sequence[int], num_layers: int, groups: Sequence[torch.distributed.ProcessGroup]
) -> list[torch.Tensor]:
    """Of each micro-batch: [T, layers, k] what this pipeline stage's layers chose, numbered from 1, 0 in other layers;
    uint8 or int16 on the CPU. sizes: T of each. groups: ranks that have other tokens of the same micro-batches.
    """
    whole: list[torch.Tensor] = []
    for routing, size in zip(routings, sizes, strict=True):
        topk = next((chosen.shape[1] for chosen in routing.chosen.values()), 0)
        table = torch.zeros(size, num_layers, topk, dtype=torch.int32, device=routing.real.device)
        place = routing.tokens.to(table.device)[routing.real]
        for layer, chosen in routing.chosen.items():
            table[place, layer] = chosen[routing.real].int() + 1
        for group in groups:
            # Each rank has its own tokens and zeros elsewhere. All have the same micro-batches, so all come.
            torch.distributed.all_reduce(table, group=group)
        whole.append(table.to(compact_dtype(int(table.max()) if table.numel() else 0)).cpu())
    return whole


def compact_dtype(most: int) -> torch.dtype:
    """The smallest dtype for experts numbered up to `most`."""
    return torch.uint8 if most <= torch.iinfo(torch.uint8).max else torch.int16
