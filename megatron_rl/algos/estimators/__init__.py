"""Advantage estimators. A new one is one file, its test, and one line in ESTIMATORS."""

from __future__ import annotations

from megatron_rl.algos.estimators.base import Estimator
from megatron_rl.algos.estimators.dr_grpo import DrGrpo
from megatron_rl.algos.estimators.gae import Gae
from megatron_rl.algos.estimators.grpo import Grpo
from megatron_rl.algos.estimators.opo import Opo
from megatron_rl.algos.estimators.reinforce_plus_plus import ReinforcePlusPlus
from megatron_rl.algos.estimators.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from megatron_rl.algos.estimators.remax import Remax
from megatron_rl.algos.estimators.rloo import Rloo

ESTIMATORS: dict[str, type[Estimator]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "opo": Opo,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "remax": Remax,
    "gae": Gae,
}
"""algorithm.adv_estimator -> its class"""
