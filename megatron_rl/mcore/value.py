"""The critic's passes: values of a model with a value head, alone or beside the policy's log-probabilities.

A value belongs to its token as it is predicted, like a log-probability: the entry at token t is the value of the state
in which token t is chosen, read off the hidden state of the token before it. Nothing here depends on tensor, sequence,
context or pipeline parallelism beyond what step.py does for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_rl.algos.token_losses import TokenLoss
from megatron_rl.mcore.build import Model, Trainable
from megatron_rl.mcore.packing import MicroBatch
from megatron_rl.mcore.step import forward_columns, head_logprobs, optimizer_step, predicting_rows
from megatron_rl.types import StepReport, TrainBatch

ValueLoss = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(values [n], columns {name: [n]}) -> (losses [n], {metric: values [n]})"""


def head_values(model: Model, hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[n] float32 values at the trained tokens, from [t (/ tp), 1, h] hidden states."""
    head = getattr(model.last_chunk, "value_head", None)
    assert head is not None, "only the last pipeline stage of a critic has a value head"
    return head(predicting_rows(model, hidden, micro, partial_grads=False))


def forward_values(model: Model, batches: Sequence[TrainBatch]) -> list[torch.Tensor]:
    """Per micro-batch [T] float32 values on the CPU (see step.forward_columns)."""
    found = forward_columns(model, batches, lambda micro, hidden: {"values": head_values(model, hidden, micro)})
    return [columns["values"] for columns in found]


def forward_both(model: Model, batches: Sequence[TrainBatch], temperature: float) -> list[dict[str, torch.Tensor]]:
    """Per micro-batch {"logprobs", "values"}, from one forward pass of a model with both heads."""

    def read(micro: MicroBatch, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        logprobs, _, _ = head_logprobs(model, hidden, micro, temperature)
        return {"logprobs": logprobs, "values": head_values(model, hidden, micro)}

    return forward_columns(model, batches, read)


def train_values(
    trainable: Trainable, batches: Sequence[TrainBatch], value_loss: ValueLoss
) -> tuple[StepReport, list[torch.Tensor]]:
    """One optimizer step of the critic (see step.optimizer_step); the columns are the values it started from."""

    def objective(micro: MicroBatch, hidden: torch.Tensor) -> Any:
        values = head_values(trainable.model, hidden, micro)
        return *value_loss(values, micro.columns), values

    return optimizer_step(trainable, batches, objective)


def train_both(
    trainable: Trainable,
    batches: Sequence[TrainBatch],
    token_loss: TokenLoss,
    value_loss: ValueLoss,
    vf_coef: float,
    temperature: float,
) -> tuple[StepReport, list[torch.Tensor]]:
    """One optimizer step on policy loss + vf_coef * value loss, both heads on one forward pass; the columns are the
    log-probabilities that it started from.
    """

    def objective(micro: MicroBatch, hidden: torch.Tensor) -> Any:
        logprobs, entropy, _ = head_logprobs(trainable.model, hidden, micro, temperature)
        losses, metrics = token_loss(logprobs, entropy, micro.columns)
        value_losses, value_metrics = value_loss(head_values(trainable.model, hidden, micro), micro.columns)
        return losses + vf_coef * value_losses, metrics | value_metrics, logprobs

    return optimizer_step(trainable, batches, objective)
