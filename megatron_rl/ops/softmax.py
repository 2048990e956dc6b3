"""Softmax statistics for log-probabilities, and their backward: one pass over the logits each.

On CUDA each function is one Triton kernel (softmax_triton.py), so that logits are read once, in the precision that the
matrix product wrote them in. Elsewhere it is the torch code below, which is also what the kernels are tested against.

Shapes: logits [n, v] in any float type, of which the first `valid` columns count (the rest pad the vocabulary);
x = logits / temperature in float32. Both functions overwrite logits, which are of no use afterwards, if row_stats is
not told to keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LOWEST = -1e30
"""Stands for the peak of a row without columns: finite, so that differences of peaks are no NaN."""


@dataclass(frozen=True)
class RowStats:
    """Sums over parts of each row's valid columns, float32. They add up over parts, once rescaled to one peak.

    peak: [n, parts] max x. total: [n, parts] sum exp(x - peak). weighted: [n, parts] sum exp(x - peak) (x - peak).
    target: [n] x in the row's target column, 0 if it has none.
    """

    peak: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    target: torch.Tensor

    @staticmethod
    def cat(rows: Sequence[RowStats]) -> RowStats:
        """The rows of all, in order."""
        columns = zip(*((one.peak, one.total, one.weighted, one.target) for one in rows), strict=True)
        return RowStats(*(torch.cat(column) for column in columns))

    def rescaled(self, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """total and weighted [n] over all parts, as of `peak` [n], which is at least each part's."""
        shift = self.peak - peak[:, None]
        scale = shift.exp()
        return (scale * self.total).sum(dim=1), (scale * (self.weighted + self.total * shift)).sum(dim=1)


def row_stats(
    logits: torch.Tensor, columns: torch.Tensor, valid: int, temperature: float, *, keep: bool = False
) -> RowStats:
    """Statistics of each row. columns: [n] int64, the target's column, -1 where it is not among these. keep: logits
    stay as they are.
    """
    if valid == 0:
        nothing = logits.new_zeros(logits.shape[0], 1, dtype=torch.float32)
        return RowStats(torch.full_like(nothing, LOWEST), nothing, nothing, nothing[:, 0])
    if logits.is_cuda:
        from megatron_rl.ops import softmax_triton

        return RowStats(*softmax_triton.row_stats(logits, columns, valid, temperature))
    x = _scaled(logits.clone() if keep else logits, valid, temperature)
    found = x.gather(1, columns.clamp(min=0)[:, None]).squeeze(1)
    peak = x.amax(dim=1, keepdim=True)
    shifted = x.sub_(peak)
    exp = shifted.exp()
    total = exp.sum(dim=1, keepdim=True)
    # sum() adds pairwise; a dot product of 100,000 terms would lose two digits.
    weighted = exp.mul_(shifted).sum(dim=1, keepdim=True)
    return RowStats(peak, total, weighted, torch.where(columns >= 0, found, 0.0))


def logit_grads_(
    logits: torch.Tensor,
    columns: torch.Tensor,
    valid: int,
    temperature: float,
    *,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of the logits, written over them (same dtype); 0 in the columns that pad.

    With p = exp(x - log_z): d logprob / d x = onehot(column) - p, and d entropy / d x = -p (log p + entropy).
    log_z, entropy: [n] float32, over the whole vocabulary. grad_logprobs, grad_entropy: [n] float32, of the two
    outputs; grad_entropy None stands for zeros.
    """
    if logits.is_cuda:
        from megatron_rl.ops import softmax_triton

        if grad_entropy is None:
            grad_entropy = torch.zeros_like(grad_logprobs)
        softmax_triton.logit_grads_(logits, columns, valid, temperature, log_z, entropy, grad_logprobs, grad_entropy)
        return logits
    logits[:, valid:] = 0.0
    if valid == 0:
        return logits
    x = _scaled(logits, valid, temperature)
    log_p = x.sub_(log_z[:, None])
    p = log_p.exp()
    if grad_entropy is None:
        grads = torch.mul(p, grad_logprobs[:, None], out=log_p).neg_()
    else:
        grads = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(p)
    mine = torch.where(columns >= 0, grad_logprobs, 0.0)
    grads.scatter_add_(1, columns.clamp(min=0)[:, None], mine[:, None])
    if temperature != 1.0:
        grads.div_(temperature)
    if logits.dtype != torch.float32:
        logits[:, :valid] = grads
    return logits


def _scaled(logits: torch.Tensor, valid: int, temperature: float) -> torch.Tensor:
    """[n, valid] float32 logits / temperature; float32 logits are overwritten, others copied."""
    x = logits[:, :valid].float()
    return x if temperature == 1.0 else x.div_(temperature)
