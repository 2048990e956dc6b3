"""Section `algorithm`: which algorithm, its advantages and its KL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.algos.estimators import ESTIMATORS
from megatron_rl.algos.estimators.base import Estimator
from megatron_rl.algos.estimators.grpo import Grpo
from megatron_rl.algos.preference import PREFERENCE_LOSSES, SCORE_LOSSES
from megatron_rl.algos.preference.base import PreferenceLoss
from megatron_rl.algos.preference.losses import Dpo
from megatron_rl.algos.preference.scores import BradleyTerry, ScoreLoss
from megatron_rl.config.algorithms import AlgorithmName
from megatron_rl.config.sections.actor import KlType
from megatron_rl.config.sections.base import Choice, section

_ESTIMATOR_SHORT = {
    "norm_adv_by_std_in_grpo": "norm_by_std",
    **{name: name for name in ("gamma", "lam", "lam_critic", "lam_length_alpha", "whiten_advantages")},
}
"""algorithm.<key> that is short for algorithm.adv_estimator.<setting>"""
_CHOICE = Choice(ESTIMATORS, "grpo", _ESTIMATOR_SHORT)


@section
class KlCtrlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """Coefficient of the KL in the reward: fixed, or adapted after each step to target_kl (Ziegler et al. 2019)."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient; with type adaptive its initial value."""
    target_kl: PositiveFloat = 0.1
    """Target KL per token of the adaptive coefficient (estimator: kl_penalty)."""
    horizon: PositiveInt = 10000
    """Horizon of the adaptive coefficient, in sequences: a step changes it by at most 20 % * sequences / horizon."""


@section
class OverlongBufferConfig:
    enable: bool = False
    """Subtract a penalty from the training reward of responses that end near the length limit (DAPO)."""
    len: PositiveInt = 4096
    """Tokens before data.max_response_length over which the penalty grows linearly from 0."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty at the length limit."""


@section
class FilterGroupsConfig:
    enable: bool = False
    """Dynamic sampling (DAPO): replace groups whose samples all have the same reward by groups of further prompts."""
    metric: str = "score"
    """The value that must differ within a group: score or acc (the reward), seq_reward (the reward with the penalty of
    overlong_buffer), or a field of the reward's dict."""
    max_num_gen_batches: PositiveInt = 10
    """Maximum batches of data.train_batch_size prompts sampled per step; if groups are still missing, the step
    trains on those it has."""


@section
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence", "icepop"] | None = None
    """Importance weight of each token's policy loss, the ratio of trainer to engine probability: of the token,
    truncated at the threshold (token TIS); of its sequence (sequence TIS); or of the token, and 0 outside
    the two thresholds (IcePop)."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Maximum importance weight (IcePop: a larger ratio gets weight 0)."""
    rollout_is_threshold_lower: PositiveFloat = 0.5
    """Minimum ratio of IcePop: a smaller ratio gets weight 0."""
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    """Rejection: mask tokens, or sequences by the product or the geometric mean of their ratios, if that ratio
    is outside the thresholds."""
    rollout_rs_threshold: PositiveFloat = 2.0
    """Maximum ratio that rollout_rs keeps."""
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """Minimum ratio that rollout_rs keeps; 1 / rollout_rs_threshold if unset."""
    rollout_token_veto_threshold: PositiveFloat | None = None
    """Mask a sequence if the ratio of any of its tokens is below this (1e-4 is usual)."""
    bypass_mode: bool = False
    """Use the engine's log-probabilities as those of the old policy: saves a forward pass, and the ratio of the loss
    covers both mismatch and staleness."""

    @property
    def measures_ratio(self) -> bool:
        """The ratio of trainer to engine probabilities is needed before the update."""
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold)

    @property
    def rejects_below(self) -> float:
        """Minimum ratio that rollout_rs keeps, with its default filled in."""
        low = self.rollout_rs_threshold_lower
        return 1.0 / self.rollout_rs_threshold if low is None else low


@section
class AlgorithmConfig:
    name: AlgorithmName = "grpo"
    """Training algorithm; each is one file of megatron_rl/trainers."""
    adv_estimator: Annotated[Estimator, _CHOICE] = Field(default_factory=Grpo)
    """Advantage estimator: a name of megatron_rl.algos.estimators.ESTIMATORS, or that as `type` beside its settings."""
    loss: Annotated[PreferenceLoss, Choice(PREFERENCE_LOSSES, "dpo", {})] = Field(default_factory=Dpo)
    """Loss of algorithm.name dpo: a name of megatron_rl.algos.preference.PREFERENCE_LOSSES (dpo, cdpo, ipo, kto, simpo,
    orpo), or that as `type` beside its settings."""
    reward_loss: Annotated[ScoreLoss, Choice(SCORE_LOSSES, "bradley_terry", {})] = Field(default_factory=BradleyTerry)
    """Loss of algorithm.name reward_model: bradley_terry (pairs) or regression (answers with a number), or that as
    `type` beside its settings."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef * KL(policy, reference) from the reward."""
    kl_ctrl: KlCtrlConfig = Field(default_factory=KlCtrlConfig)
    kl_penalty: KlType = "k1"
    """KL estimator of the KL in the reward."""
    drop_flat_groups: bool = False
    """Leave groups whose samples all have the same reward out of the update (advantage 0); they are counted."""
    overlong_filtering: bool = False
    """Mask responses that hit the length limit in the loss (DAPO); their rewards still count in their group."""
    overlong_buffer: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    max_mismatch: PositiveFloat | None = 0.2
    """Maximum mean |log p of the engine - log p of the trainer| over sampled tokens, in nats. A step above it warns;
    max_mismatch_steps of them in a row end the run; null disables the check. Both use the same weights: 1e-6 is
    usual in float32, 0.002 to 0.05 in bfloat16."""
    max_mismatch_steps: PositiveInt = 3
    """Consecutive steps above max_mismatch that end the run."""
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)

    @property
    def estimator_name(self) -> str:
        """The name of adv_estimator."""
        return _CHOICE.type_of(self.adv_estimator)
