"""What an optimizer step minimises, from the hidden states on: token losses on top of a model's heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatron_rl.algos.losses.base import TokenMetrics
from megatron_rl.algos.token_losses import TokenLoss
from megatron_rl.mcore.build import Model
from megatron_rl.mcore.heads import head_logprobs, head_values
from megatron_rl.mcore.packing import MicroBatch

HiddenLoss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, TokenMetrics, torch.Tensor]]
"""(micro-batch, hidden states) -> (losses [n], {metric: values [n]}, a column [n] to hand back), at trained tokens"""

ValueLoss = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, TokenMetrics]]
"""(values [n], columns {name: [n]}) -> (losses [n], {metric: values [n]})"""


def token_objective(model: Model, token_loss: TokenLoss, temperature: float) -> HiddenLoss:
    """A loss of the log-probabilities; hands back those that the step started from."""

    def objective(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, TokenMetrics, torch.Tensor]:
        logprobs, entropy, _ = head_logprobs(model, hidden, micro, temperature)
        losses, metrics = token_loss(logprobs, entropy, micro.columns)
        return losses, metrics, logprobs

    return objective


def value_objective(model: Model, value_loss: ValueLoss) -> HiddenLoss:
    """A loss of the values; hands back those that the step started from."""

    def objective(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, TokenMetrics, torch.Tensor]:
        values = head_values(model, hidden, micro)
        losses, metrics = value_loss(values, micro.columns)
        return losses, metrics, values

    return objective


def weighted_sum(first: HiddenLoss, second: HiddenLoss, weight: float) -> HiddenLoss:
    """first + weight * second on one forward pass, with the metrics of both; hands back what `first` does."""

    def objective(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, TokenMetrics, torch.Tensor]:
        losses, metrics, column = first(micro, hidden)
        more_losses, more_metrics, _ = second(micro, hidden)
        return losses + weight * more_losses, metrics | more_metrics, column

    return objective
