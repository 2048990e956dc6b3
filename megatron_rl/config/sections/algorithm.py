"""Section `algorithm`: which algorithm, its advantages and its KL."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.estimators.base import Estimator
from megatron_rl.config.algorithms import AlgorithmName
from megatron_rl.config.sections.actor import KlType
from megatron_rl.config.sections.base import OneOf, section
from megatron_rl.settings import Share


@section
class KlCtrlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """Weight of the KL in the reward: constant, or moved after each step towards target_kl (Ziegler et al. 2019)."""
    kl_coef: NonNegativeFloat = 0.001
    """That weight, or the one that an adaptive run starts with."""
    target_kl: PositiveFloat = 0.1
    """KL per token that the adaptive weight aims at (estimator: kl_penalty)."""
    horizon: PositiveInt = 10000
    """Sequences over which the adaptive weight reacts: a step moves it by at most 20 % * (its sequences / horizon)."""


@section
class OverlongBufferConfig:
    enable: bool = False
    """Soft penalty on responses that end near the length limit (DAPO), on the scores of training."""
    len: PositiveInt = 4096
    """Tokens before data.max_response_length over which the penalty grows from 0."""
    penalty_factor: NonNegativeFloat = 1.0
    """The penalty at the limit."""


@section
class FilterGroupsConfig:
    enable: bool = False
    """Sample further prompts in place of groups whose samples all score the same (DAPO's dynamic sampling)."""
    metric: str = "score"
    """What must differ within a group: score or acc (the reward's value), seq_reward (with overlong_buffer's penalty),
    or a field of the reward's dict."""
    max_num_gen_batches: PositiveInt = 10
    """Most batches of data.train_batch_size prompts that one step samples; a step that still lacks groups then trains
    on those it has."""


@section
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence", "icepop"] | None = None
    """Weight of each token's policy loss by trainer / engine probability of the sample: of the token, cut at the
    threshold (token TIS); of its sequence (sequence TIS); or of the token, and 0 outside both thresholds (IcePop)."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Largest weight (IcePop: a larger ratio gets weight 0)."""
    rollout_is_threshold_lower: PositiveFloat = 0.5
    """Smallest ratio that IcePop lets pass."""
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    """Leave out of the loss what the engine and the trainer disagree about: tokens, or sequences by the product or
    the geometric mean of their ratios."""
    rollout_rs_threshold: PositiveFloat = 2.0
    """Largest ratio that is kept."""
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """Smallest ratio that is kept; 1 / rollout_rs_threshold when not given."""
    rollout_token_veto_threshold: PositiveFloat | None = None
    """A sequence with any token whose ratio is below this is left out (1e-4 is usual)."""
    bypass_mode: bool = False
    """Take the engine's log-probabilities as the old policy's: no forward pass for them, and the loss's own ratio
    covers mismatch and staleness."""

    @property
    def measures_ratio(self) -> bool:
        """Trainer / engine ratios are needed before the update."""
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold)

    @property
    def rejects_below(self) -> float:
        """Smallest ratio that rollout_rs keeps, as in force."""
        low = self.rollout_rs_threshold_lower
        return 1.0 / self.rollout_rs_threshold if low is None else low


@section
class AlgorithmConfig:
    name: AlgorithmName = "grpo"
    """The trainer that runs: one file of megatron_rl.trainers each."""
    adv_estimator: Annotated[str, OneOf(tuple(ESTIMATORS))] = "grpo"
    """Advantage estimator: a name of megatron_rl.algos.estimators.ESTIMATORS."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation (GRPO); false is Dr.GRPO's form."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef * KL(policy, reference) from the reward."""
    kl_ctrl: KlCtrlConfig = Field(default_factory=KlCtrlConfig)
    kl_penalty: KlType = "k1"
    """Estimator of the KL in the reward."""
    drop_flat_groups: bool = False
    """Leave groups whose samples all score the same out of the update (no advantage); counted and shown."""
    gamma: Share = 1.0
    """Discount of later rewards: of GAE, REINFORCE++ and ReMax."""
    lam: Share = 1.0
    """GAE's lambda of the policy's advantages."""
    whiten_advantages: bool = True
    """Shift and scale GAE's advantages to mean 0 and deviation 1 over all tokens of the step (PPO)."""
    lam_critic: Share | None = None
    """GAE's lambda of the critic's returns (VAPO: 1.0); lam when not given."""
    lam_length_alpha: PositiveFloat | None = None
    """Length-adaptive lambda of the policy's advantages, 1 - 1 / (alpha * length) (VAPO: 0.05), in place of lam."""
    overlong_filtering: bool = False
    """Leave responses that hit the length limit out of the loss (DAPO); their scores still count in the group."""
    overlong_buffer: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    max_mismatch: PositiveFloat | None = 0.2
    """Largest mean over sampled tokens of |log p of the engine - log p of the trainer|, in nats: a step above it warns,
    and max_mismatch_steps of them in a row end the run. null turns it off. Both compute with the same weights: 1e-6 is
    usual in float32, 0.002 to 0.05 in bfloat16."""
    max_mismatch_steps: PositiveInt = 3
    """Steps in a row above max_mismatch that end the run."""
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)

    @property
    def estimator(self) -> Estimator:
        """The estimator with its settings."""
        chosen = ESTIMATORS[self.adv_estimator]
        settings = {
            "norm_by_std": self.norm_adv_by_std_in_grpo,
            **{name: getattr(self, name) for name in ("gamma", "lam", "lam_critic", "lam_length_alpha")},
            "whiten_advantages": self.whiten_advantages,
        }
        known = {field.name for field in fields(chosen)}
        return chosen(**{name: value for name, value in settings.items() if name in known})
