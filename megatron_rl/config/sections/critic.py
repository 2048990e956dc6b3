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
    """Train a critic, a value model (algorithm.name ppo)."""
    path: UserPath | None = None
    """Folder with the initial weights of the critic: a language model (its value head is new and starts at 0), or a
    sequence or token classifier with one label (its score head is the value head); model.path if unset."""
    share_backbone: bool = False
    """Actor and critic share one transformer with two heads and one forward pass; loss = policy + vf_coef * value."""
    vf_coef: PositiveFloat = 0.5
    """Coefficient of the value loss with share_backbone."""
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; as the actor if unset."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Maximum sequences per forward pass and rank; as the actor if unset."""
    max_tokens_per_gpu: PositiveInt | None = None
    """Maximum tokens per forward pass and rank; as the actor if unset."""
    ppo_epochs: PositiveInt | None = None
    """Optimizer epochs over the rollouts of a step; as the actor if unset."""
    cliprange_value: NonNegativeFloat = 0.5
    """Clip range of the new value around the value that the returns were computed with; 0 disables clipping."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are averaged into one loss, always over the global mini-batch."""
    tp: PositiveInt | None = None
    """Tensor parallelism (TP) size; must be the actor's, which it is if unset."""
    pp: PositiveInt | None = None
    """Pipeline parallelism (PP) size; must be the actor's, which it is if unset."""
    cp: PositiveInt | None = None
    """Context parallelism (CP) size; must be the actor's, which it is if unset."""
    sequence_parallel: bool | None = None
    """Sequence parallelism; must be the actor's, which it is if unset."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activation recomputation in the backward pass; as the actor if unset."""
    param_offload: bool = False
    """Offload the critic's parameters to host memory outside its own passes."""
    grad_offload: bool = False
    """Free the critic's gradient buffers outside its own passes."""
    optimizer_offload: bool = False
    """Offload the critic's optimizer state and float32 master parameters to host memory outside its own passes."""

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What leaves the device outside the critic's own passes."""
        return offloaded_kinds(self.param_offload, self.grad_offload, self.optimizer_offload)
