"""Log-probability and entropy straight from hidden states, over a vocabulary split by tensor parallelism.

Logits exist only a chunk of tokens at a time, forward and backward, in the model's precision, and are never gathered
over the vocabulary: a rank sends four numbers a token, once for all chunks.
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


def _chunks(num_tokens: int, weight: torch.Tensor, size: int) -> list[slice]:
    """Tokens whose logits take at most `size` bytes; one empty chunk of no tokens."""
    rows = max(1, size // (weight.shape[0] * weight.element_size()))
    rows = rows // _TILE * _TILE or rows
    return [slice(start, start + rows) for start in range(0, max(num_tokens, 1), rows)]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, targets: Any, temperature: float, shard: VocabShard) -> Any:
        columns = shard.columns(targets)
        stats = RowStats.cat(
            [
                row_stats(torch.mm(hidden[part], weight.t()), columns[part], shard.valid, temperature)
                for part in _chunks(len(columns), weight, _CHUNK_BYTES)
            ]
        )
        peak = shard.reduce(stats.peak.amax(dim=1), torch.distributed.ReduceOp.MAX)
        target = torch.where(columns >= 0, stats.target - peak, 0.0)
        total, weighted, target = shard.reduce(torch.stack([*stats.rescaled(peak), target]))
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, columns, log_total + peak, entropy)
        ctx.temperature, ctx.shard = temperature, shard
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
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in float32: half precision would lose the small ones. A frozen head has no gradient.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(columns), weight, 2 * _CHUNK_BYTES):
            grad_logits = logit_grads_(
                torch.mm(hidden[part], weight.t()),
                columns[part],
                ctx.shard.valid,
                ctx.temperature,
                log_z=log_z[part],
                entropy=entropy[part],
                grad_logprobs=grad_logprobs[part],
                grad_entropy=None if grad_entropy is None else grad_entropy[part],
            )
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product_(grad_weight, grad_logits, hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def linear_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, [n] float32, differentiable; and [n] bool,
    whether the target is the most likely id (what greedy sampling picks).

    hidden: [n, h], the same on all ranks of shard.group. weight: [v / tp, h], this rank's rows of the output matrix.
    targets: [n] int64 vocabulary ids. The distribution is softmax(hidden @ weight.T / temperature).
    The gradient of `hidden` is this rank's part: the caller's graph adds the parts over the group.
    """
    return _LinearLogprob.apply(hidden, weight, targets, temperature, shard)  # type: ignore[return-value]
