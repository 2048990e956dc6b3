"""Log-probabilities and entropy straight from hidden states, over a vocabulary split by tensor parallelism.

Logits exist only a chunk of tokens at a time, forward and backward, and are never gathered over the vocabulary: a rank
sends three numbers a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Group = torch.distributed.ProcessGroup

# Logits of one chunk, in elements: 128 MiB in float32.
_CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output matrix that this rank holds.

    start: first vocabulary id; valid: rows that are real (the rest pad the vocabulary and get no probability).
    """

    start: int
    valid: int
    group: Group | None


def _sum_over_ranks(values: torch.Tensor, shard: VocabShard, op: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
    if shard.group is not None and shard.group.size() > 1:
        torch.distributed.all_reduce(values, op=op, group=shard.group)
    return values


def _chunk_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, shard: VocabShard) -> torch.Tensor:
    """[c, h] x [v, h] -> [c, v] float32 logits / temperature; padded rows are -inf."""
    logits = torch.mm(hidden, weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    if shard.valid < weight.shape[0]:
        logits[:, shard.valid :] = float("-inf")
    return logits


def _local_targets(targets: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each target on this rank (0 where it is elsewhere), and whether it is here."""
    row = targets - shard.start
    here = (row >= 0) & (row < shard.valid)
    return torch.where(here, row, 0), here


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, targets: Any, temperature: float, shard: VocabShard) -> Any:
        chunk = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        num_tokens = hidden.shape[0]
        logprobs, entropy, log_z = (hidden.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        greedy = hidden.new_empty(num_tokens, dtype=torch.bool)
        for start in range(0, num_tokens, chunk):
            part = slice(start, start + chunk)
            logits = _chunk_logits(hidden[part], weight, temperature, shard)
            peak = _sum_over_ranks(logits.max(dim=-1).values, shard, torch.distributed.ReduceOp.MAX)
            row, here = _local_targets(targets[part], shard)
            target = torch.where(here, logits.gather(1, row[:, None]).squeeze(1) - peak, 0.0)
            shifted = logits.sub_(peak[:, None])
            exp = shifted.exp()
            weighted = torch.einsum("cv,cv->c", exp, shifted.masked_fill_(shifted == float("-inf"), 0.0))
            total, weighted, target = _sum_over_ranks(torch.stack([exp.sum(-1), weighted, target]), shard)
            log_total = total.log()
            greedy[part] = target >= 0.0
            logprobs[part] = target - log_total
            entropy[part] = log_total - weighted / total
            log_z[part] = log_total + peak
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.shard, ctx.chunk = temperature, shard, chunk
        ctx.mark_non_differentiable(greedy)
        return logprobs, entropy, greedy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprobs, grad_entropy, _ = grads
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in float32: half precision would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = _chunk_logits(hidden[part], weight, ctx.temperature, ctx.shard).sub_(log_z[part, None])
            probs = logp.exp()
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + H)
            logp.masked_fill_(logp == float("-inf"), 0.0).add_(entropy[part, None]).mul_(-grad_entropy[part, None])
            grad_logits = probs.mul_(logp.sub_(grad_logprobs[part, None]))
            row, here = _local_targets(targets[part], ctx.shard)
            grad_logits.scatter_add_(1, row[:, None], torch.where(here, grad_logprobs[part], 0.0)[:, None])
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[part] = torch.mm(grad_logits, weight)
            grad_weight += torch.mm(grad_logits.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def linear_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, [n] float32, differentiable; and [n] bool,
    whether the
    target is the most likely id (what greedy sampling picks).

    hidden: [n, h], the same on all ranks of shard.group. weight: [v / tp, h], this rank's rows of the output matrix.
    targets: [n] int64 vocabulary ids. The distribution is softmax(hidden @ weight.T / temperature).
    The gradient of `hidden` is this rank's part: the caller's graph adds the parts over the group.
    """
    return _LinearLogprob.apply(hidden, weight, targets, temperature, shard)  # type: ignore[return-value]
