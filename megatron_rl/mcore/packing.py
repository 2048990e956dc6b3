"""Sequences end to end (THD) as one micro-batch: tokens, positions, and how attention walks over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.types import TrainBatch

# A padded group of sequences may waste this share of its cells, or be no longer than this many tokens, before the
# next sequence opens a group of its own.
_GROUP_FILL = 0.75
_SHORT = 32


@dataclass
class AttentionGroup:
    """Sequences of like length that attention computes as one padded batch. Pads lie right of every real token.

    index: [b, l] int64, packed position of each cell (pads repeat the sequence's first token).
    real: [b * l] bool.
    """

    index: torch.Tensor
    real: torch.Tensor


@dataclass
class Packed(PackedSeqParams):
    """Megatron's packed-sequence record with what this package's core attention needs besides."""

    cos: torch.Tensor | None = None
    """[t, 1, head_dim] rotary cosines; positions restart in each sequence"""
    sin: torch.Tensor | None = None
    groups: tuple[AttentionGroup, ...] = ()
    inverse: torch.Tensor | None = None
    """[t] int64: where each packed token lies in the groups' outputs end to end"""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. t tokens, n of them trained on."""

    tokens: torch.Tensor
    """[1, t] int64"""
    packed: Packed
    predictors: torch.Tensor
    """[n] int64: positions whose output predicts a trained token (that token is the next one)"""
    targets: torch.Tensor
    """[n] int64: those tokens"""
    columns: dict[str, torch.Tensor]
    """name -> [n] float32, the batch's columns at those tokens"""
    num_real_tokens: int
    """Tokens without the padding sequence"""


def plan_groups(seq_lens: Sequence[int]) -> list[list[int]]:
    """Sequence numbers grouped by like length, longest first.

    Example: lengths [5, 100, 6, 90] -> [[1, 3], [2, 0]].
    """
    order = sorted(range(len(seq_lens)), key=lambda s: -seq_lens[s])
    groups: list[list[int]] = []
    for s in order:
        longest = seq_lens[groups[-1][0]] if groups else 0
        if groups and (longest <= _SHORT or seq_lens[s] >= _GROUP_FILL * longest):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _attention_groups(seq_lens: Sequence[int], starts: torch.Tensor) -> tuple[tuple[AttentionGroup, ...], torch.Tensor]:
    groups, flat = [], []
    for members in plan_groups(seq_lens):
        lens = torch.tensor([seq_lens[s] for s in members])
        offset = torch.arange(int(lens.max()))
        real = offset[None, :] < lens[:, None]
        index = starts[torch.tensor(members)][:, None] + torch.where(real, offset[None, :], 0)
        groups.append(AttentionGroup(index=index, real=real.reshape(-1)))
        flat.append(index.reshape(-1)[real.reshape(-1)])
    return tuple(groups), torch.argsort(torch.cat(flat))


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of RoPE (Su et al. 2021), half-rotated layout: [t] -> two [t, 1, head_dim] float32."""
    inverse_freq = 1.0 / theta ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    )
    angles = positions.float()[:, None] * inverse_freq[None, :]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def pack(
    batch: TrainBatch, *, head_dim: int, rope_theta: float, device: torch.device, multiple: int = 1, pad_id: int = 0
) -> MicroBatch:
    """TrainBatch -> MicroBatch on `device`.

    multiple: t is padded to a multiple of this (sequence parallelism splits t) by one sequence of pad_id that
    nothing is trained on. A batch without sequences becomes one padding sequence, so that all ranks make the same
    passes.
    """
    seq_lens = list(batch.seq_lens)
    total = batch.num_tokens
    padding = -total % multiple if total else max(multiple, 1)
    if padding:
        seq_lens.append(padding)
    lens = torch.tensor(seq_lens)
    starts = torch.cumsum(lens, 0) - lens
    positions = torch.arange(total + padding) - torch.repeat_interleave(starts, lens)
    tokens = torch.cat([batch.tokens, torch.full((padding,), pad_id)])
    trained = batch.loss_mask.nonzero().squeeze(-1)
    groups, inverse = _attention_groups(seq_lens, starts)
    cos, sin = rotary(positions.to(device), head_dim, rope_theta)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lens, 0)]).to(device, torch.int32)
    packed = Packed(
        qkv_format="thd",  # type: ignore[arg-type]
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(seq_lens),
        max_seqlen_kv=max(seq_lens),
        cos=cos,
        sin=sin,
        groups=tuple(AttentionGroup(group.index.to(device), group.real.to(device)) for group in groups),
        inverse=inverse.to(device),
    )
    return MicroBatch(
        tokens=tokens[None, :].to(device),
        packed=packed,
        predictors=(trained - 1).to(device),
        targets=batch.tokens[trained].to(device),
        columns={name: column[trained].to(device) for name, column in batch.columns.items()},
        num_real_tokens=total,
    )
