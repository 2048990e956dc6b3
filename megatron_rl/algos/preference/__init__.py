"""Losses of preferences and of reward models. A new one is one class, its test, and one line here."""

from __future__ import annotations

from megatron_rl.algos.preference.base import PreferenceLoss
from megatron_rl.algos.preference.losses import Cdpo, Dpo, Ipo, Kto, Orpo, Simpo
from megatron_rl.algos.preference.scores import BradleyTerry, Regression, ScoreLoss

PREFERENCE_LOSSES: dict[str, type[PreferenceLoss]] = {
    "dpo": Dpo,
    "cdpo": Cdpo,
    "ipo": Ipo,
    "kto": Kto,
    "simpo": Simpo,
    "orpo": Orpo,
}
"""algorithm.loss.type -> its class"""
SCORE_LOSSES: dict[str, type[ScoreLoss]] = {"bradley_terry": BradleyTerry, "regression": Regression}
"""algorithm.reward_loss.type -> its class"""
