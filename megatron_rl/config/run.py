"""The whole run: its sections, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from megatron_rl.config.algorithms import ALGORITHMS, Needs
from megatron_rl.config.sections.actor import ActorConfig, RefConfig
from megatron_rl.config.sections.algorithm import AlgorithmConfig
from megatron_rl.config.sections.base import section
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.critic import CriticConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.engines import ENGINES, Engine


@section
class RunConfig:
    """Everything a run is told. Frozen; every value is in force as it stands here."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def needs(self) -> Needs:
        """What the run's algorithm needs."""
        return ALGORITHMS[self.algorithm.name]

    @property
    def engine(self) -> Engine:
        """The rollout engine, and what it can do."""
        return ENGINES[self.rollout.name]

    @property
    def needs_reference(self) -> bool:
        """The run compares the policy with a frozen one."""
        return self.needs.rollouts and (self.actor.use_kl_loss or self.algorithm.use_kl_in_reward)

    @property
    def critic_training(self) -> ActorConfig:
        """How the critic trains, in the actor's terms: its own keys where given, else the actor's."""
        critic = self.critic
        names = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "max_tokens_per_gpu", "ppo_epochs", "recompute")
        own = {name: getattr(critic, name) for name in names if getattr(critic, name) is not None}
        return replace(
            self.actor,
            optim=critic.optim,
            loss_agg_mode=critic.loss_agg_mode,
            param_offload=critic.param_offload,
            grad_offload=critic.grad_offload,
            optimizer_offload=critic.optimizer_offload,
            **own,
        )

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.cluster.nnodes * self.cluster.n_gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the actor: tp * pp * cp."""
        return self.actor.tp * self.actor.pp * self.actor.cp

    @property
    def dp_size(self) -> int:
        """Data-parallel copies of the actor."""
        return self.world_size // self.model_parallel_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_tokens_per_pass(self) -> int:
        """Tokens of one forward pass: context parallelism spreads them over cp ranks."""
        return self.actor.max_tokens_per_gpu * self.actor.cp

    @property
    def mini_batch_size(self) -> int:
        """Prompts (SFT: sequences) of one optimizer step."""
        size = self.actor.ppo_mini_batch_size if self.needs.rollouts else None
        return self.data.train_batch_size if size is None else size

    @property
    def samples_per_prompt(self) -> int:
        """Sequences that one prompt (SFT: row) becomes."""
        return self.rollout.n if self.needs.rollouts else 1
