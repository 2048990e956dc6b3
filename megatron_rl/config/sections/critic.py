"""Section `critic`: the value model of PPO, how it trains, and what it takes over from the actor."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.config.sections.actor import LossAggMode, OptimConfig, offloaded_kinds
from megatron_rl.config.sections.base import UserPath, section


@section
class CriticOptimConfig(OptimConfig):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""


@section
class CriticConfig:
    enable: bool = False
    """Train a value model (algorithm.name ppo)."""
    path: UserPath | None = None
    """Folder the critic starts from: a language model (its value head is new and starts at 0), or a sequence or token
    classifier with one label (its score head is the value head); model.path when not given."""
    share_backbone: bool = False
    """One transformer for actor and critic, a head each, one forward pass for both; loss = policy + vf_coef * value."""
    vf_coef: PositiveFloat = 0.5
    """Weight of the value loss with share_backbone."""
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts of one optimizer step; the actor's when not given."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Most sequences in one forward pass of a rank; the actor's when not given."""
    max_tokens_per_gpu: PositiveInt | None = None
    """Most tokens in one forward pass of a rank; the actor's when not given."""
    ppo_epochs: PositiveInt | None = None
    """Passes over the rollouts of one step; the actor's when not given."""
    cliprange_value: NonNegativeFloat = 0.5
    """The new value counts as at most this far from the one that the returns were made with; 0 turns clipping off."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; always over the global mini-batch."""
    tp: PositiveInt | None = None
    """Tensor-parallel ranks; the actor's when not given."""
    pp: PositiveInt | None = None
    """Pipeline stages; the actor's when not given."""
    cp: PositiveInt | None = None
    """Context-parallel ranks; the actor's when not given."""
    sequence_parallel: bool | None = None
    """Split activations between tensor-parallel ranks along the sequence; the actor's choice when not given."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activations computed again in the backward pass instead of kept; the actor's choice when not given."""
    param_offload: bool = False
    """Keep the critic's weights in host memory outside its own passes."""
    grad_offload: bool = False
    """Free the critic's gradients outside its own passes."""
    optimizer_offload: bool = False
    """Keep the critic's optimizer state and float32 master weights in host memory outside its own passes."""

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What leaves the device outside the critic's own passes."""
        return offloaded_kinds(self.param_offload, self.grad_offload, self.optimizer_offload)
