"""Losses of preferences: their formulas in Python floats, their slopes, and a row's loss spread over its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron_rl.algos.preference import PREFERENCE_LOSSES
from megatron_rl.algos.preference.base import Answers
from megatron_rl.algos.preference.losses import Dpo, Kto, Orpo
from megatron_rl.algos.preference.metrics import figure_means, row_figures
from megatron_rl.algos.preference.scores import BradleyTerry, Regression
from megatron_rl.algos.preference.tokens import AnswerLoss, kl_estimate

VALUES, REFS, LENS = [-3.0, -8.0, -20.0, -1.5], [-4.0, -7.0, -18.0, -2.0], [3.0, 5.0, 7.0, 2.0]


def _sigma(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _odds(value: float, length: float) -> float:
    p = math.exp(value / length)
    return math.log(p / (1.0 - p))


def _by_hand(row: Callable[[int, int], float]) -> list[float]:
    return [row(0, 1), row(2, 3)]


def _delta(c: int, r: int) -> float:
    return (VALUES[c] - REFS[c]) - (VALUES[r] - REFS[r])


def _mean(i: int) -> float:
    return VALUES[i] / LENS[i]


def _ratio(i: int) -> float:
    return (VALUES[i] - REFS[i]) / LENS[i]


EXPECTED: dict[str, list[float]] = {
    "dpo": _by_hand(lambda c, r: -math.log(_sigma(0.1 * _delta(c, r)))),
    "cdpo": _by_hand(
        lambda c, r: -0.9 * math.log(_sigma(0.1 * _delta(c, r))) - 0.1 * math.log(_sigma(-0.1 * _delta(c, r)))
    ),
    "ipo": _by_hand(lambda c, r: (_ratio(c) - _ratio(r) - 5.0) ** 2),
    "simpo": _by_hand(lambda c, r: -math.log(_sigma(2.0 * (_mean(c) - _mean(r)) - 1.0))),
    "orpo": _by_hand(lambda c, r: -0.1 * math.log(_sigma(_odds(VALUES[c], LENS[c]) - _odds(VALUES[r], LENS[r])))),
    "kto": [1.0 - _sigma(0.1 * s * (VALUES[i] - REFS[i] - 0.7)) for i, s in enumerate([1, -1, -1, 1])],
}


def answers_of(name: str) -> Answers:
    values, refs, lens = (torch.tensor(one, dtype=torch.float64) for one in (VALUES, REFS, LENS))
    targets = [1.0, -1.0, -1.0, 1.0] if name == "kto" else [0.0, 0.0]
    return Answers(values, refs, lens, torch.tensor(targets, dtype=torch.float64), 0.7 if name == "kto" else 0.0)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_losses_equal_their_papers_formulas(name: str) -> None:
    losses = PREFERENCE_LOSSES[name]()(answers_of(name))
    assert losses.tolist() == pytest.approx(EXPECTED[name], rel=1e-12)


def test_dpo_may_add_the_nll_of_chosen_answers() -> None:
    losses = Dpo(nll_coef=0.5)(answers_of("dpo"))
    wanted = [plain - 0.5 * _mean(c) for plain, c in zip(EXPECTED["dpo"], (0, 2), strict=True)]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_slope_at_the_start_is_half_of_beta() -> None:
    """Policy and reference are one at the first step: a slope of 0 or beta there would not show in losses."""
    values = torch.tensor([-2.0, -3.0], dtype=torch.float64, requires_grad=True)
    two, none = torch.ones(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    Dpo(beta=0.5)(Answers(values, values.detach(), two, none)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [-0.25, 0.25]


def test_scores_of_reward_models_by_hand() -> None:
    scores = torch.tensor([2.0, 0.5, -1.0, 1.0], dtype=torch.float64)
    pairs = Answers(scores, scores * 0, torch.ones(4), torch.tensor([0.25, 0.0], dtype=torch.float64))
    wanted = [-math.log(_sigma(1.5 - 0.25)), -math.log(_sigma(-2.0))]
    assert BradleyTerry()(pairs).tolist() == pytest.approx(wanted)
    centered = [wanted[0] + 0.1 * 2.5**2, wanted[1]]
    assert BradleyTerry(center_coef=0.1)(pairs).tolist() == pytest.approx(centered)
    means = figure_means(row_figures(BradleyTerry(), pairs), ["a", "a"])
    assert (means["accuracy"], means["margin"], means["chosen_score"]) == (0.5, -0.25, 0.5)
    assert "chosen_logprob" not in means
    single = Answers(scores[:2], scores[:2] * 0, torch.ones(2), torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert Regression()(single).tolist() == [1.0, 0.25]
    assert figure_means(row_figures(Regression(), single), ["a", "b"])["error/b"] == 0.5


def test_certain_answers_have_finite_odds() -> None:
    values = torch.tensor([0.0, -800.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(2, dtype=torch.float64)
    loss = Orpo()(Answers(values, torch.zeros_like(values), one, torch.zeros(1))).sum()
    loss.backward()
    assert math.isfinite(loss.item()) and values.grad is not None and bool(values.grad.isfinite().all())


def tokens_of(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token values whose sums are VALUES, and columns; the first token of each chosen answer is of its prompt."""
    lens = [int(length) for length in LENS]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lens))
    share = torch.tensor(VALUES, dtype=torch.float64) / torch.tensor(LENS)
    columns = {
        "segment_ids": segments,
        "sequence_lens": torch.tensor(lens),
        "ref_logprobs": (torch.tensor(REFS, dtype=torch.float64) / torch.tensor(LENS))[segments],
    }
    if name == "kto":
        columns["targets"] = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)[segments]
    return share[segments].clone().requires_grad_(), columns


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_n3_a_rows_loss_is_spread_over_its_tokens_with_its_gradient(name: str) -> None:
    """The sum over tokens is the sum over rows; so is it if two ranks hold the tokens of each sequence in turn."""
    loss, per_row = PREFERENCE_LOSSES[name](), 1 if name == "kto" else 2
    kl = 0.7 if name == "kto" else 0.0
    values, columns = tokens_of(name)
    losses, _ = AnswerLoss(loss, per_row, kl)(values, columns)
    losses.sum().backward()
    assert losses.sum().item() == pytest.approx(sum(EXPECTED[name]), rel=1e-9)
    whole = answers_of(name)
    leaf = whole.values.clone().requires_grad_()
    loss(Answers(leaf, whole.ref_logprobs, whole.lens, whole.targets, kl)).sum().backward()
    assert leaf.grad is not None and values.grad is not None
    assert torch.allclose(values.grad, leaf.grad[columns["segment_ids"]], rtol=1e-9)
    # Each of two ranks has every second token, and what the other one adds to the sums.
    picks = [torch.arange(len(values)) % 2 == rank for rank in range(2)]

    def part(pick: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        here = {one: of if one == "sequence_lens" else of[pick] for one, of in columns.items()}
        return values.detach()[pick].requires_grad_(), here

    sums: list[torch.Tensor] = []
    for pick in picks:
        AnswerLoss(loss, per_row, kl, lambda one: sums.append(one.clone()) or one)(*part(pick))
    of_ranks = []
    for pick in picks:
        leaf, here = part(pick)
        spread, _ = AnswerLoss(loss, per_row, kl, lambda one: sums[0] + sums[1])(leaf, here)
        spread.sum().backward()
        of_ranks.append(spread.sum().item())
        assert leaf.grad is not None and torch.allclose(leaf.grad, values.grad[pick], rtol=1e-9)
    assert sum(of_ranks) == pytest.approx(sum(EXPECTED[name]), rel=1e-9)


def test_prompts_count_in_the_nll_alone() -> None:
    values, columns = tokens_of("orpo")
    in_answers = torch.ones(len(values), dtype=torch.float64)
    in_answers[[0, 8]] = 0.0
    nll_weights = torch.zeros(len(values), dtype=torch.float64)
    nll_weights[:3] = 0.5
    losses, _ = AnswerLoss(Orpo(), 2)(values, columns | {"answers": in_answers, "nll_weights": nll_weights})
    losses.sum().backward()
    assert values.grad is not None and values.grad[0].item() == -0.5 and values.grad[8].item() == 0.0
    lens = [2.0, 5.0, 6.0, 2.0]
    odds = [_odds(VALUES[i] / LENS[i] * lens[i], lens[i]) for i in range(4)]
    wanted = -0.1 * sum(math.log(_sigma(odds[c] - odds[r])) for c, r in ((0, 1), (2, 3))) + 0.5 * 3.0
    assert losses.sum().item() == pytest.approx(wanted, rel=1e-9)


def test_a_micro_batch_without_rows_has_no_loss() -> None:
    none = torch.zeros(0, requires_grad=True)
    empty = {"segment_ids": torch.zeros(0, dtype=torch.int64), "sequence_lens": torch.zeros(0, dtype=torch.int64)}
    losses, _ = AnswerLoss(Dpo(), 2)(none, empty)
    assert losses.shape == (0,) and losses.sum().item() == 0.0


def test_ktos_kl_is_a_mean_and_never_negative() -> None:
    assert kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0])) == 0.5
    assert kl_estimate(torch.tensor([-2.0]), torch.tensor([-1.0])) == 0.0


def test_metrics_of_pairs_and_of_labels_by_source() -> None:
    means = figure_means(row_figures(Dpo(), answers_of("dpo")), ["a", "b"])
    assert (means["accuracy"], means["accuracy/a"], means["accuracy/b"]) == (0.5, 1.0, 0.0)
    assert means["margin/a"] == pytest.approx(0.2) and means["margin"] == pytest.approx((0.2 - 0.25) / 2)
    assert means["chosen_reward"] == pytest.approx((0.1 - 0.2) / 2) and means["rejected_length"] == 3.5
    assert means["chosen_logprob"] == -11.5 and means["loss"] == pytest.approx(sum(EXPECTED["dpo"]) / 2)
    labels = figure_means(row_figures(Kto(), answers_of("kto")), ["a"] * 4)
    # Log ratios 1, -1, -2, 0.5 of a good, two bad and a good answer, and z0 is 0.7.
    assert labels["accuracy"] == 0.75 and labels["chosen_reward"] == pytest.approx(0.075)
    assert labels["margin"] == pytest.approx(0.075 + 0.15) and "accuracy/a" not in labels
    # Equal rewards are no preference.
    one = torch.ones(2, dtype=torch.float64)
    even = Answers(one, one, one, torch.zeros(1))
    assert figure_means(row_figures(Dpo(), even), ["a"])["accuracy"] == 0.0
