"""On a GPU: the CUDA kernels of csrc/ against a float64 loop and against the CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from megatron_rl.algos.scan import KlPenalty, TokenScan
from megatron_rl.ops.advantages import GROUP_KINDS, KERNELS, group_advantages
from tests.helpers.kernels import require_kernels
from tests.helpers.scans import Case, assert_close, random_case, slow_scan

pytestmark = pytest.mark.gpu
TILE = 3584
"""Tokens of a block; 32 blocks are a group, and a warp looks at 32 groups at a time."""


@pytest.fixture(autouse=True)
def built() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if "cuda" not in require_kernels().built_for():
        pytest.skip("the kernels were built without nvcc")


def assert_same(found: TokenScan, wanted: TokenScan, rtol: float = 1e-5) -> None:
    """found on the GPU."""
    for ours, exact in ((found.advantages, wanted.advantages), (found.returns, wanted.returns)):
        assert ours.is_cuda
        assert torch.allclose(ours.cpu(), exact, rtol=rtol, atol=1e-12), (ours.cpu() - exact).abs().max()
    assert float(found.moments.count) == float(wanted.moments.count)
    assert float(found.moments.mean) == pytest.approx(float(wanted.moments.mean), rel=1e-6, abs=1e-9)
    assert float(found.moments.squares) == pytest.approx(float(wanted.moments.squares), rel=1e-6)


def assert_equal_bits(one: TokenScan, other: TokenScan) -> None:
    assert torch.equal(one.advantages.flatten(), other.advantages.flatten())
    assert torch.equal(one.returns.flatten(), other.returns.flatten())
    assert one.moments.mean == other.moments.mean and one.moments.squares == other.moments.squares


@pytest.mark.parametrize("seed", range(24))
def test_n5_random_shapes_equal_a_float64_loop(seed: int) -> None:
    """Any lengths, masks, lambdas of each sequence, penalties and dtypes; empty sequences, and none at all."""
    generator = torch.Generator().manual_seed(seed)
    most, count = ((9, 7), (300, 40), (9000, 5))[seed % 3]
    lens = torch.randint(0, most + 1, (int(torch.randint(0, count, (1,), generator=generator)),), generator=generator)
    case = random_case(
        lens.tolist(), seed, own_lams=bool(seed & 1), with_kl=bool(seed & 2), half=bool(seed & 4)
    )  # fmt: skip
    assert_close(case.to("cuda").run(KERNELS), slow_scan(case))


@pytest.mark.parametrize(
    "lens",
    [
        [TILE - 1], [TILE], [TILE + 1], [2 * TILE, 1], [1, 2 * TILE], [TILE - 1, 1, 1, TILE], [1] * (3 * TILE + 5),
        [32 * TILE - 1, 2], [32 * TILE, 32 * TILE], [33 * TILE + 3, 64 * TILE], [5_000_000, 3],
        [17] * 500 + [2_000_000] + [23] * 500, [8192] * 200, [0, 0, 9000, 0, 5, 0],
    ],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)  # fmt: skip
@pytest.mark.parametrize("own_lams", [False, True])
def test_n5_tiles_and_groups_of_tiles(lens: Sequence[int], own_lams: bool) -> None:
    """Against the CPU kernels, which are compared with a loop; three times, with the same bits."""
    case = random_case(lens, 1, own_lams=own_lams, with_kl=own_lams, half=own_lams)
    moved = case.to("cuda")
    found = moved.run(KERNELS)
    assert_same(found, case.run(KERNELS))
    for _ in range(2):
        assert_equal_bits(moved.run(KERNELS), found)


def test_without_a_discount_a_reward_is_carried_over_any_distance() -> None:
    """gamma = lambda = 1: each return is the sum of all later rewards, exactly, over 1,500 tiles."""
    total = 1500 * TILE + 77
    rewards = torch.zeros(total)
    rewards[-1], rewards[total // 2] = 1.0, 2.0
    case = Case(rewards, None, torch.ones(total, dtype=torch.bool), torch.tensor([0, total]), 1.0, 1.0, None)
    found = case.to("cuda").run(KERNELS).advantages.cpu()
    assert bool((found[: total // 2 + 1] == 3.0).all()) and bool((found[total // 2 + 1 :] == 1.0).all())


@pytest.mark.parametrize(("rows", "length"), [(9, 37), (64, 8192), (3, 5000), (5000, 3), (2, 0), (0, 7)])
def test_padded_equals_packed(rows: int, length: int) -> None:
    case = random_case([length] * rows, 3, own_lams=True, with_kl=True).to("cuda")
    assert_equal_bits(case.padded(rows, length).run(KERNELS), case.run(KERNELS))


def test_any_alignment_and_stride() -> None:
    case = random_case([5000, 3, 20_000], 4).to("cuda")
    wanted = case.run(KERNELS)
    for start in (1, 2, 4):
        room = {}
        for name, one in case.columns().items():
            room[name] = torch.zeros(len(one) + start, dtype=one.dtype, device="cuda")[start:]
            room[name].copy_(one)
        assert_equal_bits(case.having(**room).run(KERNELS), wanted)
    strided = {name: torch.stack([one, one], dim=1)[:, 0] for name, one in case.columns().items()}
    assert_equal_bits(case.having(**strided).run(KERNELS), wanted)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_numbers_that_are_not_finite_are_carried_back_and_no_further(bad: float, lam: float) -> None:
    case = random_case([30, 200_000, 30], 6, all_trained=True).having(lam=lam, critic_lam=lam, gamma=0.9).to("cuda")
    where = 200_000
    found, clean = case.having(rewards=_with(case.rewards, where, bad)).run(KERNELS), case.run(KERNELS)
    for column, of_clean in ((found.advantages, clean.advantages), (found.returns, clean.returns)):
        assert not column[30 : where + 1].isfinite().any()
        assert torch.equal(column[:30], of_clean[:30]) and torch.equal(column[where + 1 :], of_clean[where + 1 :])
    assert not found.moments.squares.isfinite()
    hidden = case.having(
        mask=_with(case.mask, where, False),
        values=_with(case.known, where, bad),
        rewards=_with(case.rewards, where, 0.0),
    )
    assert hidden.run(KERNELS).advantages.isfinite().all()


def _with(column: torch.Tensor, where: int, value: float | bool) -> torch.Tensor:
    return column.index_fill(0, torch.tensor([where], device=column.device), value)


def test_what_cannot_be_is_refused() -> None:
    case = random_case([4, 5000], 7, all_trained=True).to("cuda")
    with pytest.raises(ValueError, match="1 rewards lie on tokens that are not trained"):
        case.having(mask=_with(case.mask, 5003, False)).run(KERNELS)
    for cu in ([0, 4, 5000], [1, 4, 5004], [0, 5004, 4, 5004], [0, -9, 5004], [0, 10**12, 5004]):
        with pytest.raises(ValueError, match="cu_seqlens must"):
            case.having(cu=torch.tensor(cu, device="cuda")).run(KERNELS)
    with pytest.raises(ValueError, match="lambdas be 0 to 1"):
        case.having(lam=torch.tensor([0.5, math.nan], device="cuda")).run(KERNELS)


def test_penalties_are_those_of_the_estimators() -> None:
    case = random_case([3000, 40], 9)
    generator = torch.Generator().manual_seed(9)
    logprobs, ref = (-8 * torch.rand(3040, generator=generator) for _ in range(2))
    ref[:3] = logprobs[:3] + torch.tensor([30.0, -30.0, 2.9])
    for name in ("k1", "k2", "k3", "abs"):
        one = case.having(kl=KlPenalty(0.3, logprobs, ref, name))
        assert_same(one.to("cuda").run(KERNELS), one.run(KERNELS))


def test_moments_are_over_kept_sequences_and_whitening_follows_them() -> None:
    kept = torch.tensor([True, False, True, True])
    case = random_case([10_000, 30_000, 0, 5000], 10).having(kept=kept)
    moved = case.to("cuda")
    found, wanted = moved.run(KERNELS), case.run(KERNELS)
    assert_same(found, wanted)
    for shift_mean in (True, False):
        white = [
            KERNELS.whiten(s.advantages, c.mask, c.cu, c.kept, *_mean_std(wanted, c.mask.device), shift_mean=shift_mean)
            for s, c in ((found, moved), (wanted, case))
        ]
        assert torch.allclose(white[0].cpu(), white[1], rtol=1e-5, atol=1e-7)
    flat = Case(torch.full((40_000,), 0.1), None, torch.ones(40_000).bool(), torch.arange(40_001), 1.0, 1.0, None)
    moments = flat.to("cuda").run(KERNELS).moments
    assert moments.squares == 0.0 and float(moments.mean) == float(torch.tensor(0.1))


def _mean_std(scan: TokenScan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = scan.moments.over_ranks(lambda sums: sums)
    return mean.to(device), std.to(device)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_n5_advantages_of_groups(kind: str) -> None:
    generator = torch.Generator().manual_seed(12)
    returns = torch.randn(5000, generator=generator).double()
    returns[::7] = 1.0
    returns[11] = math.nan
    for most in (1, 40, 5000, 2**62):
        ids = torch.randint(-most, most, (5000,), generator=generator)
        found = group_advantages(returns.cuda(), ids.cuda(), kind).cpu()
        wanted = group_advantages(returns, ids, kind)
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)
        assert torch.equal(found == 0, wanted == 0)


def test_calls_on_several_streams_do_not_meet() -> None:
    cases = [random_case([3000] * 50, seed).to("cuda") for seed in range(4)]
    wanted = [case.run(KERNELS) for case in cases]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in cases], list[TokenScan]()
    for _ in range(10):
        found.clear()
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(case.run(KERNELS))
        torch.cuda.synchronize()
        for one, other in zip(found, wanted, strict=True):
            assert_equal_bits(one, other)


def test_operators_pass_torchs_checks() -> None:
    case = random_case([5, 0, 9], 12).to("cuda")
    args = (case.rewards, case.values, case.mask, case.cu, None, None, None, 0, 0.0, 0.9, 0.8, 0.7, None, None)
    torch.library.opcheck(torch.ops.megatron_rl.gae.default, args)
    returns, ids = torch.randn(6, dtype=torch.float64).cuda(), torch.tensor([3, 3, 1, 1, 3, 9]).cuda()
    torch.library.opcheck(torch.ops.megatron_rl.group_advantages.default, (returns, ids, 1))


def small_calls() -> None:
    """Each kernel on a few tiles, for compute-sanitizer: python -m tests.gpu.test_advantage."""
    for seed, lens in enumerate(([9000, 3, 0, 4096, 7], [1] * 5000, [70_000], [5000] * 3)):
        for odd in (False, True):
            case = random_case(lens, seed, own_lams=odd, with_kl=odd, half=odd).to("cuda")
            found = case.run(KERNELS)
            mean, std = found.moments.over_ranks(lambda sums: sums)
            KERNELS.whiten(
                found.advantages[1:], case.mask[1:], torch.tensor([0, sum(lens) - 1]).cuda(), None, mean, std
            )
            if len(set(lens)) == 1:
                case.padded(len(lens), lens[0]).having(kept=torch.ones(len(lens)).bool().cuda()).run(KERNELS)
    returns = torch.arange(100.0, dtype=torch.float64, device="cuda")
    print(float(group_advantages(returns, torch.arange(100, device="cuda") % 7, "std").sum()))


if __name__ == "__main__":
    small_calls()
