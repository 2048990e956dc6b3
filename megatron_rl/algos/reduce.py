"""From token losses to one number: the weight of each token, with denominators over the global mini-batch."""

from __future__ import annotations

import torch


def loss_weights(
    mode: str, loss_mask: torch.Tensor, segment_ids: torch.Tensor, num_sequences: int, norm_length: int
) -> torch.Tensor:
    """[T] float32 weights w with loss = sum(w * token_loss) over the whole mini-batch; 0 where loss_mask is False.

    With N trained tokens in all, N_s in sequence s, S sequences that train any token, and L = norm_length:
        token-mean               1 / N                 (DAPO, Yu et al. 2025)
        seq-mean-token-sum       1 / S
        seq-mean-token-mean      1 / (S N_s)           (GRPO, Shao et al. 2024)
        seq-mean-token-sum-norm  1 / (S L)             (Dr. GRPO, Liu et al. 2025; L the longest response allowed)
    The denominators are of all sequences given, so call this before the batch is split over ranks or micro-batches.
    """
    mask = loss_mask.double()
    per_sequence = torch.zeros(num_sequences, dtype=torch.float64).index_add_(0, segment_ids, mask)
    trained = max(int((per_sequence > 0).sum()), 1)
    if mode == "token-mean":
        weights = mask / mask.sum().clamp(min=1)
    elif mode == "seq-mean-token-sum":
        weights = mask / trained
    elif mode == "seq-mean-token-mean":
        weights = mask / (trained * per_sequence.clamp(min=1)[segment_ids])
    elif mode == "seq-mean-token-sum-norm":
        weights = mask / (trained * norm_length)
    else:
        raise ValueError(f"loss_agg_mode {mode!r} is not known")
    return weights.float()
