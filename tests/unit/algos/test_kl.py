"""KL estimators: value and gradient of each against the exact ones, by enumeration of a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algos.kl import KL_ESTIMATORS, KL_LOSSES, kl_loss

VOCAB = 7
# Where the expected gradient of each is the KL's own, with samples of the policy, and with those of an older one
# and the importance ratio.
EXACT_ON_POLICY = {"k2", "k1+", "k2+", "k3+", "abs+"}
EXACT_WITH_RATIO = {"k1", "k3", "k1+", "k2+", "k3+", "abs+"}


def _setting() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy logits, its log-probabilities, the reference's, an older policy's."""
    torch.manual_seed(0)
    logits = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    ref, old = (torch.log_softmax(torch.randn(VOCAB, dtype=torch.float64), 0) for _ in range(2))
    return logits, torch.log_softmax(logits, 0), ref, old


def _exact_gradient(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    logp = torch.log_softmax(logits, 0)
    return torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits)[0]


@pytest.mark.parametrize("name", KL_LOSSES)
def test_n4_on_policy_gradients_over_a_small_vocabulary(name: str) -> None:
    """N4: the expected gradient of each estimator is what its docstring says; biased ones are biased here too."""
    logits, logp, ref, _ = _setting()
    (found,) = torch.autograd.grad((logp.detach().exp() * kl_loss(name, logp, ref)).sum(), logits)
    assert torch.allclose(found, _exact_gradient(logits, ref)) == (name in EXACT_ON_POLICY)
    if name == "k1":
        assert found.abs().max() < 1e-12
    if name == "k3":
        (reverse,) = torch.autograd.grad(-(ref.exp() * torch.log_softmax(logits, 0)).sum(), logits)
        assert torch.allclose(found, reverse)


@pytest.mark.parametrize("name", KL_LOSSES)
def test_n4_gradients_on_an_older_policys_samples(name: str) -> None:
    """N4: the ratio makes k1, k3 and every + form exact on samples of another policy; without it none of them is."""
    logits, logp, ref, old = _setting()
    exact = _exact_gradient(logits, ref)
    terms = kl_loss(name, logp, ref, torch.exp(logp - old))
    (found,) = torch.autograd.grad((old.exp() * terms).sum(), logits, retain_graph=True)
    assert torch.allclose(found, exact) == (name in EXACT_WITH_RATIO)
    (without,) = torch.autograd.grad((old.exp() * kl_loss(name, logp, ref)).sum(), logits)
    assert not torch.allclose(without, exact)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_plus_changes_the_gradient_alone(name: str) -> None:
    _, logp, ref, old = _setting()
    assert torch.allclose(kl_loss(f"{name}+", logp, ref), kl_loss(name, logp, ref))
    ratio = torch.exp(logp - old)
    assert torch.allclose(kl_loss(f"{name}+", logp, ref, ratio), kl_loss(name, logp, ref, ratio))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_are_unbiased_for_k1_and_k3_alone(name: str) -> None:
    _, logp, ref, old = _setting()
    exact = float((logp.exp() * (logp - ref)).sum())
    unbiased = name in ("k1", "k3")
    on_policy = float((logp.exp() * kl_loss(name, logp, ref)).sum())
    weighted = float((old.exp() * kl_loss(name, logp, ref, torch.exp(logp - old))).sum())
    assert (on_policy == pytest.approx(exact)) == unbiased
    assert (weighted == pytest.approx(exact)) == unbiased


@pytest.mark.parametrize(
    ("gap", "value", "gradient"),
    [
        (0.0, 0.0, 0.0),
        (2.5, math.expm1(2.5) - 2.5, 1.0 - math.exp(2.5)),
        (2.7, 10.0, 0.0),
        (20.0, 10.0, 0.0),
        (89.0, 10.0, 0.0),
        (1e4, 10.0, 0.0),
        (-10.5, math.expm1(-10.5) + 10.5, 1.0 - math.exp(-10.5)),
        (-11.5, 10.0, 0.0),
        (-19.9, 10.0, 0.0),
        (-300.0, 10.0, 0.0),
    ],
)
def test_n4_k3_has_verls_cuts(gap: float, value: float, gradient: float) -> None:
    """N4: log-ratio log(q/p) to +-20, value to 10; past a cut there is no gradient, and nothing is infinite."""
    logp = torch.zeros(1, requires_grad=True)
    found = kl_loss("k3", logp, torch.tensor([gap]))
    (slope,) = torch.autograd.grad(found.sum(), logp)
    assert found.item() == pytest.approx(value, rel=1e-5) and slope.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("name", KL_LOSSES)
@pytest.mark.parametrize("gap", [-1e4, -89.0, -21.0, 21.0, 89.0, 1e4])
def test_n4_far_references_leave_no_infinity(name: str, gap: float) -> None:
    """Value and gradient are finite; a + form has the gradient log p - log q, which verl does not cut either, and the
    other forms have no cut but k3's.
    """
    logp = torch.zeros(1, requires_grad=True)
    found = kl_loss(name, logp, torch.tensor([gap]))
    (slope,) = torch.autograd.grad(found.sum(), logp)
    assert bool(found.isfinite()) and bool(slope.isfinite())
    wanted = {"k1": -gap, "k2": gap * gap / 2, "k3": 10.0, "abs": abs(gap)}[name.rstrip("+")]
    assert found.item() == pytest.approx(wanted, rel=1e-5)
    if name.endswith("+"):
        assert slope.item() == pytest.approx(-gap)
