"""Log-probability and entropy straight from hidden states, over a vocabulary split by tensor parallelism.

Logits exist a chunk of tokens at a time, in the model's precision, and are never gathered over the vocabulary: a rank
sends four numbers a token, once for all chunks. The backward pass needs them again. It computes them again, but for the
first tokens, whose logits the forward pass keeps as far as the memory that it is given goes (`keep_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.ops.accumulate import add_product_
from megatron_rl.ops.softmax import RowStats, logit_grads_, row_stats

# Logits of one chunk: 768 tokens of a vocabulary of 152k in bfloat16, enough to keep a GPU's matrix units busy. The
# backward pass takes twice as many: each of its chunks adds a whole weight gradient to the sum.
_CHUNK_BYTES = 1 << 28
# Chunks are whole tiles of a matrix product where they are longer than one.
_TILE = 128


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output matrix that this rank holds.

    start: first vocabulary id; valid: rows that are real (the rest pad the vocabulary and get no probability).
    """

    start: int
    valid: int
    group: torch.distributed.ProcessGroup | None

    def columns(self, targets: torch.Tensor) -> torch.Tensor:
        """The row of each target here, -1 where it is on another rank."""
        row = targets - self.start
        return torch.where((row >= 0) & (row < self.valid), row, -1)

    def reduce(self, values: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
        """`values` combined in place over the ranks that hold the vocabulary."""
        if self.group is not None and self.group.size() > 1 and values.numel():
            # The ranks of the group have the same tokens, so all come or none does.
            torch.distributed.all_reduce(values, op=op, group=self.group)
        return values


def _chunks(start: int, end: int, weight: torch.Tensor, size: int) -> list[slice]:
    """The tokens from start to end, in parts whose logits take at most `size` bytes; one empty part of no tokens."""
    rows = max(1, size // (weight.shape[0] * weight.element_size()))
    rows = rows // _TILE * _TILE or rows
    return [slice(at, min(at + rows, end)) for at in range(start, end, rows)] or [slice(0, 0)] * (end == 0)


def _kept_rows(num_tokens: int, weight: torch.Tensor, size: int) -> int:
    """Of how many tokens `size` bytes hold the logits: whole tiles of a product, or all tokens."""
    rows = size // (weight.shape[0] * weight.element_size())
    return num_tokens if rows >= num_tokens else rows // _TILE * _TILE


@dataclass(frozen=True)
class HeadMemory:
    """What the head may keep of a forward pass, and where its weight's gradient goes."""

    keep_bytes: int = 0
    """Logits that are kept for the backward pass, on this rank; 0: all of them are computed again"""
    grad_sum: torch.Tensor | None = None
    """[v / tp, h] float32, to which the gradient of the weight is added, so that none is returned; None: it is"""


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, targets: Any, temperature: float, shard: VocabShard, memory: HeadMemory
    ) -> Any:
        columns = shard.columns(targets)
        keeps = any(ctx.needs_input_grad[:2])
        kept = _kept_rows(len(columns), weight, memory.keep_bytes) if keeps else 0
        stats, logits = [], None
        if kept:
            logits = torch.mm(hidden[:kept], weight.t())
            stats.append(row_stats(logits, columns[:kept], shard.valid, temperature, keep=True))
        stats += [
            row_stats(torch.mm(hidden[part], weight.t()), columns[part], shard.valid, temperature)
            for part in _chunks(kept, len(columns), weight, _CHUNK_BYTES)
        ]
        both = RowStats.cat(stats)
        peak = shard.reduce(both.peak.amax(dim=1), torch.distributed.ReduceOp.MAX)
        target = torch.where(columns >= 0, both.target - peak, 0.0)
        total, weighted, target = shard.reduce(torch.stack([*both.rescaled(peak), target]))
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, columns, log_total + peak, entropy)
        ctx.temperature, ctx.shard, ctx.memory = temperature, shard, memory
        # Not among the saved tensors: the backward pass writes over it.
        ctx.logits = logits
        greedy = target >= 0.0
        ctx.mark_non_differentiable(greedy)
        ctx.set_materialize_grads(False)
        return target - log_total, entropy, greedy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprobs, grad_entropy, _ = grads
        hidden, weight, columns, log_z, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_z)
        # Taken once: a second backward pass over the same graph computes its logits again.
        logits, ctx.logits = ctx.logits, None
        kept = 0 if logits is None else logits.shape[0]
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in float32: half precision would lose the small ones. A frozen head has no gradient.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            given = ctx.memory.grad_sum
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if given is None else given
        for part in [*([slice(0, kept)] if kept else []), *_chunks(kept, len(columns), weight, 2 * _CHUNK_BYTES)]:
            grad_logits = logit_grads_(
                torch.mm(hidden[part], weight.t()) if logits is None else logits,
                columns[part],
                ctx.shard.valid,
                ctx.temperature,
                log_z=log_z[part],
                entropy=entropy[part],
                grad_logprobs=grad_logprobs[part],
                grad_entropy=None if grad_entropy is None else grad_entropy[part],
            )
            logits = None
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product_(grad_weight, grad_logits, hidden[part])
        if grad_weight is None:
            return grad_hidden, None, None, None, None, None
        if ctx.memory.grad_sum is None:
            return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
        # Megatron's hook of the parameter wants a gradient; this one takes no memory.
        return grad_hidden, weight.new_zeros(()).expand_as(weight), None, None, None, None


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: VocabShard,
    memory: HeadMemory = HeadMemory(),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, [n] float32, differentiable; and [n] bool,
    whether the target is the most likely id (what greedy sampling picks).

    hidden: [n, h], the same on all ranks of shard.group. weight: [v / tp, h], this rank's rows of the output matrix.
    targets: [n] int64 vocabulary ids. The distribution is softmax(hidden @ weight.T / temperature).
    The gradient of `hidden` is this rank's part: the caller's graph adds the parts over the group.
    """
    return _LinearLogprob.apply(hidden, weight, targets, temperature, shard, memory)  # type: ignore[return-value]
