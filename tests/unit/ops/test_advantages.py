"""The kernels of csrc/ on CPUs and the torch code that they stand for, against loops over tokens in float64."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algos.gae import whiten
from megatron_rl.algos.scan import CreditKernels, KlPenalty
from megatron_rl.ops import advantages as ops
from tests.helpers.kernels import BACKENDS, ROOT, kernels_of, require_kernels
from tests.helpers.scans import Case, assert_close, random_case, slow_scan

# tests/gpu has all of them: tracing through torch.compile's parts takes 6 s.
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")
LENS = st.lists(st.integers(0, 9), min_size=0, max_size=7)


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> CreditKernels:
    return kernels_of(request.param)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(LENS, st.integers(0, 9999), st.booleans(), st.booleans(), st.booleans())
def test_n5_scans_equal_a_float64_loop(
    backend: str, lens: list[int], seed: int, own_lams: bool, with_kl: bool, half: bool
) -> None:
    """N5: any lengths, masks, lambdas of each sequence, penalties and dtypes; empty sequences, and none at all."""
    case = random_case(lens, seed, own_lams=own_lams, with_kl=with_kl, half=half)
    assert_close(case.run(kernels_of(backend)), slow_scan(case))


@pytest.mark.parametrize("lens", [[40_000, 3, 0, 16_384, 1, 32_768, 16_383, 7], [1] * 40_000, [16_384] * 3])
@pytest.mark.parametrize("own_lams", [False, True])
def test_n5_sequences_across_many_chunks_equal_a_float64_loop(lens: list[int], own_lams: bool) -> None:
    """N5: what is carried from chunk to chunk, by the built kernels. bfloat16 too, which is widened in blocks."""
    case = random_case(lens, 1, own_lams=own_lams, with_kl=own_lams, half=own_lams)
    assert_close(case.run(require_kernels().KERNELS), slow_scan(case))


def test_n5_one_long_sequence_beside_many_short_ones() -> None:
    """N5: 2M tokens beside 1,000 short responses; twice, and on other numbers of threads, with the same bits."""
    case = random_case([17] * 500 + [2_000_000] + [23] * 500, 2)
    kernels, threads = require_kernels().KERNELS, torch.get_num_threads()
    first = case.run(kernels)
    assert_close(first, slow_scan(case))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again = case.run(kernels)
            assert torch.equal(again.advantages, first.advantages) and torch.equal(again.returns, first.returns)
            assert again.moments.mean == first.moments.mean and again.moments.squares == first.moments.squares
    finally:
        torch.set_num_threads(threads)


def test_padded_equals_packed(kernels: CreditKernels) -> None:
    """Bit for bit; rows may have any number of padding tokens, which are not trained."""
    case = random_case([37] * 9, 3, own_lams=True, with_kl=True)
    packed, padded = case.run(kernels), case.padded(9, 37).run(kernels)
    assert padded.advantages.shape == (9, 37)
    assert torch.equal(padded.advantages.flatten(), packed.advantages)
    assert torch.equal(padded.returns.flatten(), packed.returns)
    assert padded.moments.squares == packed.moments.squares


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_n5_observation_tokens_change_nothing(data: st.DataObject) -> None:
    """N5: with and without observations among the trained tokens, by the built kernels and the torch code."""
    lens = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    case = random_case(lens, data.draw(st.integers(0, 999)))
    plain = Case(
        case.rewards[case.mask],
        case.known[case.mask],
        case.mask[case.mask],
        torch.tensor([int(case.mask[:end].sum()) for end in case.starts.tolist()]),
        case.gamma,
        case.lam,
        case.critic_lam,
    )
    for backend in BACKENDS:
        mixed, alone = case.run(kernels_of(backend)), plain.run(kernels_of(backend))
        assert torch.equal(mixed.advantages[case.mask], alone.advantages)
        assert torch.equal(mixed.returns[case.mask], alone.returns)
        assert not mixed.advantages[~case.mask].any() and not mixed.returns[~case.mask].any()


def test_any_alignment_and_stride(kernels: CreditKernels) -> None:
    """Views that begin anywhere, and columns of a matrix."""
    case = random_case([50, 3, 200], 4)
    wanted = case.run(kernels).advantages
    total = len(case.rewards)
    for start in (1, 3):
        room = {name: torch.zeros(total + start, dtype=one.dtype) for name, one in case.columns().items()}
        for name, one in case.columns().items():
            room[name][start:] = one
        shifted = case.having(**{name: one[start:] for name, one in room.items()})
        assert torch.equal(shifted.run(kernels).advantages, wanted)
    strided = {name: torch.stack([one, one], dim=1)[:, 0] for name, one in case.columns().items()}
    assert torch.equal(case.having(**strided).run(kernels).advantages, wanted)


def test_bfloat16_is_what_float32_is_of_the_same_numbers(kernels: CreditKernels) -> None:
    case = random_case([50, 3, 400], 5, with_kl=True, half=True)
    mixed = case.having(values=case.known.float())
    assert case.rewards.dtype == torch.bfloat16 and mixed.known.dtype == torch.float32
    assert torch.equal(case.run(kernels).advantages, mixed.run(kernels).advantages)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_numbers_that_are_not_finite_are_carried_back_and_no_further(
    kernels: CreditKernels, bad: float, lam: float
) -> None:
    """To all earlier tokens of the sequence, over any distance and chunk, and to the moments."""
    lens = [30, 20_000, 30] if kernels is not kernels_of("torch") else [30, 200, 30]
    case = random_case(lens, 6, all_trained=True).having(lam=lam, critic_lam=lam, gamma=0.9)
    where = 30 + lens[1] - 10
    found = case.having(rewards=case.rewards.index_fill(0, torch.tensor([where]), bad)).run(kernels)
    clean = case.run(kernels)
    for column, of_clean in ((found.advantages, clean.advantages), (found.returns, clean.returns)):
        assert not column[30 : where + 1].isfinite().any()
        assert torch.equal(column[:30], of_clean[:30]) and torch.equal(column[where + 1 :], of_clean[where + 1 :])
    assert not found.moments.squares.isfinite()
    # A number on a token that is not trained is never looked at, unless it is a reward, which is refused.
    mask = case.mask.index_fill(0, torch.tensor([where]), False)
    values = case.known.index_fill(0, torch.tensor([where]), bad)
    rewards = case.rewards.index_fill(0, torch.tensor([where]), 0.0)
    assert case.having(mask=mask, values=values, rewards=rewards).run(kernels).advantages.isfinite().all()


def test_what_cannot_be_is_refused(kernels: CreditKernels) -> None:
    case = random_case([4, 5], 7, all_trained=True)
    mask = case.mask.index_fill(0, torch.tensor([0, 8]), False)
    with pytest.raises(ValueError, match="2 rewards lie on tokens that are not trained"):
        case.having(mask=mask).run(kernels)
    for cu in ([0, 4, 8], [1, 4, 9], [0, 5, 4, 9]):
        with pytest.raises((ValueError, RuntimeError), match="cu_seqlens must"):
            case.having(cu=torch.tensor(cu)).run(kernels)


def test_shapes_and_dtypes_are_checked() -> None:
    case, built = random_case([4, 5], 8), require_kernels().KERNELS
    for changes, message in (
        ({"values": case.known[1:]}, "values must have the shape of rewards"),
        ({"rewards": case.rewards.double()}, "rewards must be float32 or bfloat16"),
        ({"mask": case.mask.float()}, "mask must be bool"),
        ({"cu": case.starts.int()}, "cu_seqlens must have"),
        ({"kept": torch.ones(3, dtype=torch.bool)}, "kept must have"),
        ({"gamma": 1.5}, "gamma and lambdas must be from 0 to 1"),
        ({"lam": torch.tensor([0.5, -0.5])}, "that of sequence 1 is not"),
    ):
        with pytest.raises(RuntimeError, match=message):
            case.having(**changes).run(built)


def test_penalties_are_those_of_the_estimators(kernels: CreditKernels) -> None:
    """Each KL estimator, its cuts included, is the same as its terms given; no penalty lies off the mask."""
    case = random_case([300, 40], 9)
    generator = torch.Generator().manual_seed(9)
    logprobs, ref = (-8 * torch.rand(340, generator=generator) for _ in range(2))
    ref[:3] = logprobs[:3] + torch.tensor([30.0, -30.0, 2.9])
    for name, estimate in {
        "k1": lambda gap: gap,
        "k2": lambda gap: gap * gap / 2,
        "k3": lambda gap: min(math.expm1(min(max(-gap, -20.0), 20.0)) - min(max(-gap, -20.0), 20.0), 10.0),
        "abs": abs,
    }.items():
        found = case.having(kl=KlPenalty(0.3, logprobs, ref, name)).run(kernels)
        terms = [estimate(gap) for gap in (logprobs.double() - ref.double()).tolist()]
        wanted = slow_scan(case, penalty=[0.3 * term for term in terms])
        assert_close(found, wanted)


def test_moments_are_over_kept_sequences_and_exact_for_close_values(kernels: CreditKernels) -> None:
    case = random_case([100, 300, 50], 10).having(kept=torch.tensor([True, False, True]))
    found = case.run(kernels)
    counted = case.mask & torch.tensor([True] * 100 + [False] * 300 + [True] * 50)
    picked = found.advantages[counted].double()
    assert found.moments.count == len(picked)
    assert float(found.moments.mean) == pytest.approx(float(picked.mean()), rel=1e-12)
    assert float(found.moments.squares) == pytest.approx(float((picked - picked.mean()).square().sum()), rel=1e-12)
    mean, std = found.moments.over_ranks(lambda sums: sums)
    whitened = kernels.whiten(found.advantages, case.mask, case.cu, case.kept, mean, std)
    assert torch.allclose(whitened, whiten(found.advantages, counted), rtol=1e-6)
    scaled = kernels.whiten(found.advantages, case.mask, case.cu, case.kept, mean, std, shift_mean=False)
    assert torch.allclose(scaled, whiten(found.advantages, counted, shift_mean=False), rtol=1e-6)
    # Values that differ in their last digits: a plain sum of squares would have none left.
    rewards = 1e4 + torch.arange(40_000) % 3 * 2**-10
    close = Case(rewards, None, torch.ones(40_000, dtype=torch.bool), torch.arange(40_001), 1.0, 1.0, None).run(kernels)
    exact = float(rewards.double().var(correction=0)) * 40_000
    assert float(close.moments.squares) == pytest.approx(exact, rel=1e-9)
    flat = Case(torch.full((40_000,), 0.1), None, *(close_part(40_000)), 1.0, 1.0, None).run(kernels)
    assert flat.moments.squares == 0.0 and float(flat.moments.mean) == float(torch.tensor(0.1))


def close_part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of `count` trained tokens, and sequences of one token each."""
    return torch.ones(count, dtype=torch.bool), torch.arange(count + 1)


def test_whitening_padded_rows_and_bfloat16(kernels: CreditKernels) -> None:
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(7, 300, generator=generator).bfloat16()
    mask, kept = torch.rand(7, 300, generator=generator) < 0.6, torch.tensor([True, False] * 3 + [True])
    mean, std = torch.tensor(0.2, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    wanted = ((values.double() - 0.2) / (0.9 + 1e-8) * (mask & kept[:, None])).float()
    assert torch.allclose(kernels.whiten(values, mask, None, kept, mean, std), wanted, rtol=1e-6, atol=1e-7)
    cu = torch.arange(0, 2101, 300)
    flat = kernels.whiten(values.flatten(), mask.flatten(), cu, kept, mean, std)
    assert torch.equal(flat.view(7, 300), kernels.whiten(values, mask, None, kept, mean, std))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, -5, 10**15, -(2**63), 2**63 - 1]), st.floats(-3, 3)),
        min_size=0,
        max_size=20,
    )
)
def test_n5_advantages_of_groups_equal_a_loop(backend: str, samples: list[tuple[int, float]]) -> None:
    """N5: ids that are any numbers, in any order; groups of one and of equal returns get exactly 0."""
    groups: dict[int, list[float]] = {}
    for group, value in samples:
        groups.setdefault(group, []).append(value)
    returns = torch.tensor([value for _, value in samples], dtype=torch.float64)
    ids = torch.tensor([group for group, _ in samples], dtype=torch.int64)
    if backend == "built":
        require_kernels()
    found = {kind: run_groups(backend, returns, ids, kind).tolist() for kind in ops.GROUP_KINDS}
    mean, std = kernels_of(backend).group_moments(returns, ids)
    for i, (group, value) in enumerate(samples):
        others = groups[group]
        if len(set(others)) == 1:
            assert [found[kind][i] for kind in found] == [0.0] * 3 and (mean[i], std[i]) == (value, 0.0)
            continue
        centre = math.fsum(others) / len(others)
        spread = math.sqrt(math.fsum((one - centre) ** 2 for one in others) / (len(others) - 1))
        rest = (math.fsum(others) - value) / (len(others) - 1)
        assert found["mean"][i] == pytest.approx(value - centre, rel=1e-9, abs=1e-12)
        assert found["std"][i] == pytest.approx((value - centre) / (spread + 1e-6), rel=1e-6, abs=1e-9)
        assert found["leave_one_out"][i] == pytest.approx(value - rest, rel=1e-9, abs=1e-12)
        assert float(std[i]) == pytest.approx(spread, rel=1e-9)


def run_groups(backend: str, returns: torch.Tensor, ids: torch.Tensor, kind: str) -> torch.Tensor:
    """By the kernels or, as if they were not built, by the torch code."""
    if backend == "built":
        return ops.group_advantages(returns, ids, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "built_for", frozenset[str])
        return ops.group_advantages(returns, ids, kind)


def test_a_group_with_a_number_that_is_not_finite_is_not_flat(kernels: CreditKernels) -> None:
    returns = torch.tensor([1.0, math.nan, 1.0, 2.0], dtype=torch.float64)
    mean, std = kernels.group_moments(returns, torch.tensor([0, 0, 1, 1]))
    assert mean.isnan().tolist() == std.isnan().tolist() == [True, True, False, False]


def test_operators_pass_torchs_checks() -> None:
    """Schemas, fake kernels and autograd registration, by torch.library.opcheck."""
    require_kernels()
    case = random_case([5, 0, 9], 12, own_lams=True)
    numbers = (0, 0.0, 0.9, 0.8, 0.7)
    lams = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    for values, per_sequence in ((case.values, (lams, lams)), (None, (None, None))):
        args = (case.rewards, values, case.mask, case.cu, None, None, None, *numbers, *per_sequence)
        torch.library.opcheck(torch.ops.megatron_rl.gae.default, args, test_utils=CHECKS)
    moments = torch.tensor([0.5, 2.0], dtype=torch.float64)
    whitened = (case.rewards, case.mask, case.cu, None, moments, True)
    torch.library.opcheck(torch.ops.megatron_rl.whiten.default, whitened, test_utils=CHECKS)
    returns, ids = torch.randn(6, dtype=torch.float64), torch.tensor([3, 3, 1, 1, 3, 9])
    torch.library.opcheck(torch.ops.megatron_rl.group_advantages.default, (returns, ids, 1), test_utils=CHECKS)


def test_kernels_of_other_sources_are_not_used(tmp_path: Path) -> None:
    """A checkout that was updated runs the torch code until it is built again; an installed package has no sources."""
    package, sources = tmp_path / "megatron_rl", tmp_path / "csrc"
    package.mkdir()
    (package / "_csrc_cuda_0123abcd.so").touch()
    assert ops.libraries(package) == {}, "those for CUDA have no schemas"
    (package / "_csrc_cpu_0123abcd.so").touch()
    assert list(ops.libraries(package)) == ["cpu", "cuda"]
    sources.mkdir()
    (sources / "advantage.cpp").write_text("new", encoding="utf-8")
    assert ops.libraries(package) == {}
    (package / f"_csrc_cpu_{ops.sources_digest(sources):08x}.so").touch()
    assert list(ops.libraries(package)) == ["cpu"]


def test_without_kernels_the_torch_code_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ops, "built_for", frozenset[str])
    ops._say_torch_code.cache_clear()  # pyright: ignore[reportPrivateUsage]
    case = random_case([5, 9], 13)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert_close(case.run(ops.KERNELS), slow_scan(case))
    assert [record.getMessage() for record in caplog.records] == [
        "advantages: torch code, since the kernels of csrc/ are not built for cpu (python setup.py build_ext --inplace)"
    ]


@pytest.mark.parametrize("lacking", ["torch", "compiler"])
def test_setup_goes_on_without_torch_or_a_compiler(lacking: str) -> None:
    """As on a login node, and under build isolation. Nothing is compiled."""
    code = (
        "import importlib.util as u, runpy, sys; found = u.find_spec; "
        f"u.find_spec = lambda name, *a: None if name == {lacking!r} else found(name, *a); "
        "sys.argv = ['setup.py', '--dry-run', 'build_ext']; runpy.run_path('setup.py')"
    )
    env = dict(os.environ) if lacking == "torch" else {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "csrc/ is not built: it needs torch here" in done.stdout
