"""What is read off a model's hidden states: log-probabilities by the language-model head, values by the value head.

A value belongs to its token as it is predicted, like a log-probability: the entry at token t is the value of the state
in which token t is chosen, read off the hidden state of the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_rl.mcore.build import Model
from megatron_rl.mcore.logprobs import HeadMemory, linear_logprobs
from megatron_rl.mcore.packing import MicroBatch

Reader = Callable[[MicroBatch, torch.Tensor], dict[str, torch.Tensor]]
"""(micro-batch, [t (/ tp), 1, h] hidden states) -> {column: values [n] at the trained tokens}"""


def predicting_rows(model: Model, hidden: torch.Tensor, micro: MicroBatch, *, partial_grads: bool) -> torch.Tensor:
    """[n, h] hidden states that predict the trained tokens, equal on all tensor-parallel ranks, from [t (/ tp), 1, h].

    partial_grads: each rank's gradient of them is its part of a sum (a head split over ranks); False: every rank has
    the whole gradient (a head that every rank holds).
    """
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial_grads)
    elif partial_grads:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden.squeeze(1).index_select(0, micro.predictors)


def head_logprobs(
    model: Model, hidden: torch.Tensor, micro: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [n] float32, and greedy hits [n] bool, at the trained tokens, from [t (/ tp),
    1, h] hidden states.
    """
    rows = predicting_rows(model, hidden, micro, partial_grads=True)
    memory = HeadMemory(_logits_bytes(model), model.head_grad_sum()) if rows.requires_grad else HeadMemory()
    return linear_logprobs(rows, model.head_weight(), micro.targets, temperature, model.vocab_shard(), memory)


def _logits_bytes(model: Model) -> int:
    """How much of its logits the head may keep for the backward pass on this rank."""
    limit = model.parallel.keep_logits_gib
    if limit is not None:
        return int(limit * 2**30)
    if model.device.type != "cuda":
        return 0
    # What the driver has, and what torch has and does not use. The layers' activations are there by now; the other half
    # is for what the backward pass makes on its way.
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return (torch.cuda.mem_get_info(model.device)[0] + unused) // 2


def head_values(model: Model, hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[n] float32 values at the trained tokens, from [t (/ tp), 1, h] hidden states."""
    last = model.last_chunk
    assert last is not None and last.value_head is not None, "only the last stage of a critic has a value head"
    return last.value_head(predicting_rows(model, hidden, micro, partial_grads=False))


def _token_columns(
    model: Model, hidden: torch.Tensor, micro: MicroBatch, temperature: float
) -> dict[str, torch.Tensor]:
    names = ("logprobs", "entropy", "greedy")
    return dict(zip(names, head_logprobs(model, hidden, micro, temperature), strict=True))


def _value_columns(
    model: Model, hidden: torch.Tensor, micro: MicroBatch, temperature: float
) -> dict[str, torch.Tensor]:
    return {"values": head_values(model, hidden, micro)}


READERS: dict[str, Callable[[Model, torch.Tensor, MicroBatch, float], dict[str, torch.Tensor]]] = {
    "logprobs": _token_columns,
    "entropy": _token_columns,
    "greedy": _token_columns,
    "values": _value_columns,
}
"""column -> the head that gives it, perhaps with others"""


def columns_reader(model: Model, columns: Sequence[str], temperature: float) -> Reader:
    """A reader of exactly these columns, in this order; each head runs once. temperature: of the logits' softmax."""
    heads = list(dict.fromkeys(READERS[column] for column in columns))

    def read(micro: MicroBatch, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for head in heads:
            values |= head(model, hidden, micro, temperature)
        return {column: values[column] for column in columns}

    return read
