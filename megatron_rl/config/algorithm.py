"""Section `algorithm`: which algorithm, its advantages and its KL."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from megatron_rl.config.actor import KlType
from megatron_rl.config.base import section


@section
class AlgorithmConfig:
    name: Literal["grpo", "sft"] = "grpo"
    """The trainer that runs: one file of megatron_rl.trainers each."""
    adv_estimator: str = "grpo"
    """Advantage estimator: a name of megatron_rl.algos.ADVANTAGES."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation (GRPO); false is Dr.GRPO's form."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL(policy, reference) from the reward."""
    kl_coef: NonNegativeFloat = 0.001
    """Weight of that KL in the reward."""
    kl_penalty: KlType = "k1"
    """Estimator of the KL in the reward."""
    drop_flat_groups: bool = False
    """Leave groups whose samples all score the same out of the update (no advantage); counted and shown."""
