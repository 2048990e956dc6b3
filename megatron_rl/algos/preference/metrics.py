"""What is measured of judged rows: which answers the model's rewards prefer, and by how much."""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algos.preference.base import Answers, JudgedLoss, differences


def row_figures(loss: JudgedLoss, answers: Answers) -> dict[str, Tensor]:
    """name -> [R] float64 figures of rows, NaN where a row has none.

    Of pairs: accuracy (1 if the chosen answer has the higher reward, else 0), margin (of the rewards), and of either
    answer reward, logprob (of a reward model: score) and length. Of labelled rows: accuracy (1 if the reward is above
    beta z0 just if the answer is good), and the same of good ones as chosen and of bad ones as rejected. Of scored
    rows: error (how far the score is from the target), score and length.
    """
    rewards = loss.rewards(answers)
    figures: dict[str, Tensor] = {"loss": loss(answers)}
    if loss.rows == "scored":
        return figures | {"error": (rewards - answers.targets).abs(), "score": rewards, "length": answers.lens}
    if loss.rows == "pairs":
        chosen, rejected = slice(0, None, 2), slice(1, None, 2)
        margins = differences(rewards)
        figures |= {"accuracy": (margins > 0).double(), "margin": margins}
        sides = {"chosen": chosen, "rejected": rejected}
        for side, which in sides.items():
            figures |= {f"{side}_{name}": of[which] for name, of in _each(loss, answers, rewards).items()}
        return figures
    good = answers.targets > 0
    # What the loss compares an answer with: the reward of an answer as likely as z0 says.
    even = loss.rewards(Answers(torch.full_like(rewards, answers.kl), torch.zeros_like(rewards), answers.lens, good))
    figures["accuracy"] = ((rewards > even) == good).double()
    found = _each(loss, answers, rewards)
    for side, here in (("chosen", good), ("rejected", ~good)):
        figures |= {f"{side}_{name}": of.masked_fill(~here, torch.nan) for name, of in found.items()}
    return figures


def _each(loss: JudgedLoss, answers: Answers, rewards: Tensor) -> dict[str, Tensor]:
    return {"reward": rewards, loss.value_is: answers.values, "length": answers.lens}


def figure_means(figures: dict[str, Tensor], sources: Sequence[str]) -> dict[str, float]:
    """Means over the rows that have a figure; accuracy, margin and error by data source too, if there are several."""
    means = {name: _mean(values) for name, values in figures.items()}
    if "margin" not in figures and "chosen_reward" in figures:
        means["margin"] = means["chosen_reward"] - means["rejected_reward"]
    names = sorted(set(sources))
    for source in names if len(names) > 1 else ():
        here = torch.tensor([one == source for one in sources])
        for name in ("accuracy", "margin", "error"):
            if name in figures:
                means[f"{name}/{source}"] = _mean(figures[name][here])
    return {name: value for name, value in means.items() if value == value}


def _mean(values: Tensor) -> float:
    return float(values.nanmean())
