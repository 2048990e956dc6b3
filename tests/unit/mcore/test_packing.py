"""Packed micro-batches: positions restart, no token is lost between ranks, attention stays within its sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.mcore.attention import PackedAttention, grouped_attention
from megatron_rl.mcore.packing import MicroBatch, pack, plan_groups, rotary, zigzag_layout
from megatron_rl.models.rope import Rope, Rotation
from megatron_rl.ops.rotary import apply_rotary
from megatron_rl.types import TrainBatch

CPU = torch.device("cpu")
HEAD_DIM = 8


def _batch(lens: tuple[int, ...], seed: int = 0) -> TrainBatch:
    """Random tokens; all but the first token of each sequence is trained on; column x numbers the tokens."""
    total = sum(lens)
    mask = torch.ones(total, dtype=torch.bool)
    mask[torch.cumsum(torch.tensor(lens), 0) - torch.tensor(lens)] = False
    tokens = torch.randint(0, 50, (total,), generator=torch.Generator().manual_seed(seed))
    return TrainBatch(tokens, lens, mask, {"x": torch.arange(total).float()})


WINDOWS = (0, 5, 24, 64, 1)


def _pack(batch: TrainBatch, cp: int, rank: int, split: int = 1) -> MicroBatch:
    return pack(
        batch, rotary_dim=HEAD_DIM, rotations=[Rotation(100.0, Rope())], windows=WINDOWS, device=CPU, split=split,
        cp=cp, cp_rank=rank,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_every_trained_token_is_predicted_on_exactly_one_rank(lens: list[int], cp: int, split: int) -> None:
    batch = _batch(tuple(lens))
    micros = [_pack(batch, cp, rank, split) for rank in range(cp)]
    assert len({micro.tokens.shape[1] for micro in micros}) == 1, "all ranks hold the same number of tokens"
    assert micros[0].tokens.shape[1] % split == 0
    trained = torch.cat([micro.trained for micro in micros])
    assert torch.equal(trained.sort().values, batch.loss_mask.nonzero().squeeze(1))
    for micro in micros:
        assert torch.equal(micro.targets, batch.tokens[micro.trained])
        assert torch.equal(micro.columns["x"], micro.trained.float())
        previous = batch.tokens[micro.trained - 1]
        assert torch.equal(micro.tokens[0, micro.predictors], previous), "the predictor is the token before"


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    layouts = [zigzag_layout([8, 4], cp=2, rank=rank) for rank in (0, 1)]
    assert layouts[0].position[layouts[0].held].tolist() == [0, 1, 6, 7, 0, 3]
    assert layouts[1].position[layouts[1].held].tolist() == [2, 3, 4, 5, 1, 2]


def test_groups_hold_sequences_of_like_length() -> None:
    assert plan_groups([5, 100, 6, 90]) == [[1, 3], [2, 0]]
    assert plan_groups([]) == []


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_attention_equals_attention_on_each_sequence_alone(cp: int, window: int) -> None:
    """Forward and gradients, grouped-query heads, all windows; the ranks' keys gathered as the group does it."""
    lens = (16, 3, 40, 1, 24)
    batch = _batch(lens)
    micros = [_pack(batch, cp, rank) for rank in range(cp)]
    unit = 2 * cp if cp > 1 else 1
    layout = [zigzag_layout([-(-n // unit) * unit for n in lens], cp, rank) for rank in range(cp)]
    total = len(layout[0].position)
    torch.manual_seed(0)
    q, k, v = (torch.randn(total, heads, HEAD_DIM, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    outputs = torch.zeros(total, 4, HEAD_DIM, dtype=torch.float64)
    gathered = torch.cat([one.held for one in layout])
    for rank in range(cp):
        held = layout[rank].held
        out = grouped_attention(q[held], k[gathered], v[gathered], micros[rank].packed, 0.3, window)
        outputs = outputs.index_put((held,), out)
    wanted, start = [], 0
    for length in layout[0].padded_lens:
        part = slice(start, start + length)
        qs, ks, vs = (x[part].transpose(0, 1)[None] for x in (q, k, v))
        ahead = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (ahead >= 0) & (ahead < (window or length))
        one = torch.nn.functional.scaled_dot_product_attention(qs, ks, vs, seen, scale=0.3, enable_gqa=True)
        wanted.append(one[0].transpose(0, 1))
        start += length
    expected = torch.cat(wanted)
    assert torch.allclose(outputs, expected, atol=1e-10)
    probe = torch.randn_like(expected)
    found = torch.autograd.grad((outputs * probe).sum(), (q, k, v))
    exact = torch.autograd.grad((expected * probe).sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(found, exact, strict=True))


def test_a_layer_has_the_window_of_its_number() -> None:
    config = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=2)
    layers = [PackedAttention(config, number, windows=(0, 5, 1)) for number in (1, 2, 3)]
    assert [layer.window for layer in layers] == [0, 5, 1]
    assert PackedAttention(config, 3).window == 0


def test_rope_over_a_part_of_the_head_leaves_the_rest() -> None:
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    cos, sin = rotary(torch.arange(9), 6, 100.0, Rope())
    x = torch.randn(9, 3, 16)
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None, :, 0], sin[None, :, 0])
    assert torch.allclose(apply_rotary(x, cos, sin), theirs[0].transpose(0, 1), atol=1e-6)
    assert torch.equal(apply_rotary(x, cos, sin)[..., 6:], x[..., 6:])
