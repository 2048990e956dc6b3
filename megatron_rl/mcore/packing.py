"""Sequences end to end (THD) as one micro-batch: tokens, positions, and how attention walks over them.

With context parallelism each sequence is padded to a multiple of 2 cp and cut into that many chunks; rank r holds
chunks r and 2 cp - 1 - r ("zigzag": every rank gets an early and a late chunk, so that causal attention costs all
ranks the same).

Example, cp 2, a sequence of 8: rank 0 holds positions 0 1 6 7, rank 1 holds 2 3 4 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.errors import DataError
from megatron_rl.mcore.routing import Routing
from megatron_rl.models.rope import Rope, Rotation
from megatron_rl.ops.flash import PackedLens
from megatron_rl.types import TrainBatch

# A padded group of sequences may waste this share of its cells, or be no longer than this many tokens, before the
# next sequence opens a group of its own.
_GROUP_FILL = 0.75
_SHORT = 32


@dataclass
class AttentionGroup:
    """Sequences of like length that attention computes as one padded batch. Pads lie right of every real token.

    query_index: [b, q] int64, this rank's packed position of each cell (pads repeat the sequence's first token).
    key_index: [b, k] int64, the same for keys, into the keys of all context-parallel ranks end to end.
    real: [b * q] bool. masks: window -> [b, 1, q, k] bool where key <= query < key + window (window 0: without end), or
    None if plain causality says it (cp 1, and a window that no sequence passes).
    """

    query_index: torch.Tensor
    key_index: torch.Tensor
    real: torch.Tensor
    masks: Mapping[int, torch.Tensor | None]


@dataclass
class Packed(PackedSeqParams):
    """Megatron's packed-sequence record with what this package's core attention needs besides."""

    rotary: Mapping[Rotation, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """RoPE of a layer -> cosines and sines [t, 1, rotary_dim] at this rank's tokens; each sequence begins at 0"""
    groups: tuple[AttentionGroup, ...] = ()
    inverse: torch.Tensor | None = None
    """[t] int64: where each packed token lies in the groups' outputs end to end"""
    kv_group: torch.distributed.ProcessGroup | None = None
    """context-parallel ranks, whose keys and values are gathered; None for cp 1"""
    routing: Routing | None = None
    """what routers are told and note; None for a model without experts"""

    @property
    def lens(self) -> PackedLens:
        """What kernels for packed sequences are told."""
        return PackedLens(self.cu_seqlens_q, self.cu_seqlens_kv, self.max_seqlen_q, self.max_seqlen_kv)


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on this rank: t tokens, n of them predict a trained one."""

    tokens: torch.Tensor
    """[1, t] int64"""
    packed: Packed
    predictors: torch.Tensor
    """[n] int64: positions here whose output predicts a trained token (that token is the next one of its sequence)"""
    targets: torch.Tensor
    """[n] int64: those tokens"""
    columns: dict[str, torch.Tensor]
    """name -> [n] float32, the batch's columns at those tokens; and, for losses that look at whole sequences,
    segment_ids [n] int64, each token's sequence in the TrainBatch, and sequence_lens [S] int64, the trained tokens of
    each sequence over all context-parallel ranks"""
    trained: torch.Tensor
    """[n] int64 on the CPU: those tokens' indices in the TrainBatch"""
    num_tokens: int
    """Tokens of the TrainBatch, over all context-parallel ranks"""


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of padded sequences lie, for one context-parallel rank. Pure index arithmetic.

    Letters: S sequences, P padded tokens over all ranks, t = P / cp tokens here.
    """

    padded_lens: tuple[int, ...]
    starts: torch.Tensor
    """[S] first padded token of each sequence"""
    owner: torch.Tensor
    """[P] rank that holds each padded token"""
    place: torch.Tensor
    """[P] its position among that rank's tokens"""
    held: torch.Tensor
    """[t] padded tokens of this rank, in order"""
    position: torch.Tensor
    """[P] position within the sequence"""


def zigzag_layout(padded_lens: Sequence[int], cp: int, rank: int) -> TokenLayout:
    """The layout of `rank`. Each length is a multiple of 2 cp (of 1 for cp 1)."""
    lens = torch.tensor(list(padded_lens), dtype=torch.int64)
    ends = torch.cumsum(lens, 0)
    starts = ends - lens
    sequence = torch.repeat_interleave(torch.arange(len(lens)), lens)
    position = torch.arange(int(ends[-1])) - starts[sequence]
    if cp == 1:
        every = torch.arange(len(position))
        return TokenLayout(tuple(padded_lens), starts, torch.zeros_like(every), every, every, position)
    chunk_len = (lens // (2 * cp))[sequence]
    chunk = position // chunk_len
    late = chunk >= cp
    owner = torch.where(late, 2 * cp - 1 - chunk, chunk)
    place = (starts // cp)[sequence] + position % chunk_len + torch.where(late, chunk_len, 0)
    held = (owner == rank).nonzero().squeeze(-1)
    return TokenLayout(tuple(padded_lens), starts, owner, place, held, position)


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


def _padded_cells(starts: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b] starts and lengths -> [b, longest] indices (pads repeat the start), and which cells are real."""
    offset = torch.arange(int(lens.max()))
    real = offset[None, :] < lens[:, None]
    return starts[:, None] + torch.where(real, offset[None, :], 0), real


def _masks(
    query: torch.Tensor, key: torch.Tensor, windows: set[int], longest: int, causal: bool
) -> dict[int, torch.Tensor | None]:
    """Masks of AttentionGroup. query [b, q], key [b, k]: positions. causal: plain causality needs a mask as well."""
    query, key = query[:, None, :, None], key[:, None, None, :]
    masks: dict[int, torch.Tensor | None] = {0: key <= query if causal else None}
    for window in windows - {0}:
        masks[window] = (key <= query) & (key > query - window) if window < longest else masks[0]
    return masks


def attention_groups(
    layout: TokenLayout, cp: int, windows: set[int]
) -> tuple[tuple[AttentionGroup, ...], torch.Tensor]:
    """All groups of one rank, and the order that brings their outputs back into packed order."""
    lens = torch.tensor(layout.padded_lens)
    held_position = layout.position[layout.held]
    tokens_here = len(layout.held)
    groups, flat = [], []
    for members in plan_groups(layout.padded_lens):
        picked = torch.tensor(members)
        query, real = _padded_cells(layout.starts[picked] // cp, lens[picked] // cp)
        key, key_real = _padded_cells(layout.starts[picked], lens[picked])
        key_position = torch.where(key_real, layout.position[key], int(lens.max()))
        longest = int(lens[picked].max())
        masks = _masks(held_position[query], key_position, windows, longest, cp > 1)
        if cp > 1:
            key = layout.owner[key] * tokens_here + layout.place[key]
        groups.append(AttentionGroup(query, key, real.reshape(-1), masks))
        flat.append(query.reshape(-1)[real.reshape(-1)])
    return tuple(groups), torch.argsort(torch.cat(flat))


@lru_cache(maxsize=8)
def _frequencies(rotary_dim: int, theta: float, rope: Rope, device: torch.device) -> torch.Tensor:
    """[rotary_dim / 2] float32 radians a position."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    # In float32, as transformers and vLLM have it: far positions would turn by other angles otherwise.
    return torch.tensor(rope.scaled((1.0 / theta**exponent).tolist(), theta), dtype=torch.float32, device=device)


def rotary(positions: torch.Tensor, rotary_dim: int, theta: float, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of RoPE (models/rope.py), half-rotated layout: [t] -> two [t, 1, rotary_dim] float32."""
    angles = positions.float()[:, None] * _frequencies(rotary_dim, theta, rope, positions.device)[None, :]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude


def _padded_lens(seq_lens: Sequence[int], cp: int, split: int, uniform: bool) -> list[int]:
    """Lengths that cp cuts evenly, with a sequence of padding where t would not divide by `split`."""
    unit = 2 * cp if cp > 1 else 1
    wanted = [max(seq_lens, default=0)] * len(seq_lens) if uniform else seq_lens
    lens = [-(-length // unit) * unit for length in wanted]
    padding = 0 if lens else unit
    while (sum(lens) + padding) // cp % split:
        padding += unit
    return [*lens, padding] if padding else lens


def pack(
    batch: TrainBatch,
    *,
    rotary_dim: int,
    rotations: Iterable[Rotation],
    windows: Sequence[int] = (),
    vocab_size: int | None = None,
    device: torch.device,
    split: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    kv_group: torch.distributed.ProcessGroup | None = None,
    uniform: bool = False,
    experts: int = 0,
    split_rank: int = 0,
) -> MicroBatch:
    """TrainBatch -> this rank's MicroBatch on `device`.

    rotary_dim, windows: of the model (ModelShape). rotations: RoPE of its layers.
    split: the rank's t tokens are padded to a multiple of this (sequence parallelism splits t). A batch without
    sequences becomes one sequence of padding, so that all ranks make the same passes. Nothing is trained on padding.
    uniform: pad every sequence to the longest, as a rectangular batch is (for comparison with packing). experts: of a
    layer; 0: the model has none. split_rank: which part of the t tokens this rank's routers see.

    vocab_size: tokens of the model. Raises DataError if a token is none of them: a vocabulary that is split over
    ranks would give such an id the logit of the most likely one, and an embedding of zeros.
    """
    # On the CPU, where the batch is: the device is not waited for.
    if vocab_size is not None and batch.num_tokens:
        _check_ids(batch.tokens, vocab_size)
    lens = _padded_lens(batch.seq_lens, cp, split, uniform)
    layout = zigzag_layout(lens, cp, cp_rank)
    real = torch.tensor(batch.seq_lens, dtype=torch.int64)
    within = torch.arange(batch.num_tokens) - torch.repeat_interleave(torch.cumsum(real, 0) - real, real)
    padded = torch.repeat_interleave(layout.starts[: len(real)], real) + within
    tokens = torch.zeros(sum(lens), dtype=torch.int64)
    tokens[padded] = batch.tokens
    trained = batch.loss_mask.nonzero().squeeze(-1)
    segment_ids = batch.segments[trained]
    sequence_lens = torch.bincount(segment_ids, minlength=batch.num_sequences)
    predictor = padded[trained] - 1
    here = layout.owner[predictor] == cp_rank
    trained, predictor, segment_ids = trained[here], predictor[here], segment_ids[here]
    groups, inverse = attention_groups(layout, cp, set(windows))
    positions = layout.position[layout.held].to(device)
    ends = torch.cumsum(torch.tensor(lens) // cp, 0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    packed = Packed(
        qkv_format="thd",  # type: ignore[arg-type]
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lens) // cp,
        max_seqlen_kv=max(lens) // cp,
        rotary={one: rotary(positions, rotary_dim, one.theta, one.rope) for one in set(rotations)},
        groups=tuple(_to(group, device) for group in groups),
        inverse=inverse.to(device),
        kv_group=kv_group,
        routing=_routing(batch, padded, layout, (split, split_rank), experts, device) if experts else None,
    )
    return MicroBatch(
        tokens=tokens[layout.held][None, :].to(device),
        packed=packed,
        predictors=layout.place[predictor].to(device),
        targets=batch.tokens[trained].to(device),
        columns={
            **{name: column[trained].to(device) for name, column in batch.columns.items()},
            "segment_ids": segment_ids.to(device),
            "sequence_lens": sequence_lens.to(device),
        },
        trained=trained,
        num_tokens=batch.num_tokens,
    )


def _routing(
    batch: TrainBatch,
    padded: torch.Tensor,
    layout: TokenLayout,
    part: tuple[int, int],
    experts: int,
    device: torch.device,
) -> Routing:
    """padded: [T] where each token is among the padded ones. part: (parts of the rank's tokens, which one is ours)."""
    token_of = torch.full(layout.position.shape, -1, dtype=torch.int64)
    token_of[padded] = torch.arange(batch.num_tokens)
    tokens = token_of[layout.held].chunk(part[0])[part[1]]
    routing = Routing(tokens, (tokens >= 0).to(device))
    if batch.routed is not None:
        _check_routed(batch.routed, experts)
        # One more row, of zeros, is what padding at -1 picks.
        rows = torch.cat([batch.routed, batch.routed.new_zeros(1, *batch.routed.shape[1:])])
        routing.replay = rows[tokens].to(device)
    return routing


def _check_routed(routed: torch.Tensor, experts: int) -> None:
    known = (routed > 0).sum(-1)
    if bool(((known > 0) & (known < routed.shape[-1])).any()) or (routed.numel() and int(routed.max()) > experts):
        raise DataError(
            f"the batch holds choices of experts that the model's {experts} do not allow: an expert beyond them, or a "
            "token with fewer experts than it goes to -- engine and trainer must have the same model"
        )


def _check_ids(tokens: torch.Tensor, vocab_size: int) -> None:
    least, greatest = (int(edge) for edge in torch.aminmax(tokens))
    if least < 0 or greatest >= vocab_size:
        odd = sorted({int(token) for token in tokens[(tokens < 0) | (tokens >= vocab_size)]})
        shown = ", ".join(map(str, odd[:5])) + (", ..." if len(odd) > 5 else "")
        raise DataError(
            f"the batch holds ids that are no tokens of the model: {shown}; config.json says vocab_size {vocab_size} "
            "-- use the tokenizer that belongs to the model"
        )


def _to(group: AttentionGroup, device: torch.device) -> AttentionGroup:
    masks = {window: None if mask is None else mask.to(device) for window, mask in group.masks.items()}
    return AttentionGroup(group.query_index.to(device), group.key_index.to(device), group.real.to(device), masks)
