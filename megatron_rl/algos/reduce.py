"""From token losses to one number: the weight of each token, with denominators over the global mini-batch."""

from __future__ import annotations

import torch

from megatron_rl.algos.gae import Sums, alone


def loss_weights(
    mode: str,
    loss_mask: torch.Tensor,
    segment_ids: torch.Tensor,
    num_sequences: int,
    norm_length: int,
    *,
    mini_of: torch.Tensor | None = None,
    num_minis: int = 1,
    add_up: Sums = alone,
) -> torch.Tensor:
    """[T] float32 weights w with loss = sum(w * token_loss) over a mini-batch; 0 where loss_mask is False.

    With N trained tokens in all, N_s in sequence s, S sequences that train any token, and L = norm_length:
        token-mean               1 / N                 (DAPO, Yu et al. 2025)
        seq-mean-token-sum       1 / S
        seq-mean-token-mean      1 / (S N_s)           (GRPO, Shao et al. 2024)
        seq-mean-token-sum-norm  1 / (S L)             (Dr. GRPO, Liu et al. 2025; L the longest response allowed)
    N and S are those of the sequence's mini-batch over all ranks, so no later split can change the gradient.

    mini_of: [S] int64, the mini-batch of each sequence, from 0 to num_minis - 1; one mini-batch if not given.
    """
    mask = loss_mask.double()
    lens = torch.zeros(num_sequences, dtype=torch.float64).index_add_(0, segment_ids, mask)
    minis = torch.zeros(num_sequences, dtype=torch.int64) if mini_of is None else mini_of
    counts = torch.zeros(num_minis, 2, dtype=torch.float64)
    counts.index_add_(0, minis, torch.stack([lens, (lens > 0).double()], dim=1))
    tokens, trained = add_up(counts).clamp(min=1)[minis].unbind(1)
    if mode == "token-mean":
        denominators = tokens
    elif mode == "seq-mean-token-sum":
        denominators = trained
    elif mode == "seq-mean-token-mean":
        denominators = trained * lens.clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        denominators = trained * norm_length
    else:
        raise ValueError(f"loss_agg_mode {mode!r} is not known")
    return (mask / denominators[segment_ids]).float()
