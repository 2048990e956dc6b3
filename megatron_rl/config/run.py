"""The whole run: its sections, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from megatron_rl.algos.preference.base import JudgedLoss
from megatron_rl.config.algorithms import ALGORITHMS, Needs
from megatron_rl.config.sections.actor import ActorConfig, LossAggMode, OptimConfig, ParallelConfig, RefConfig
from megatron_rl.config.sections.algorithm import AlgorithmConfig
from megatron_rl.config.sections.base import section
from megatron_rl.config.sections.checkpoint import CheckpointConfig
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.config.sections.critic import CriticConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.config.sections.trainer import TrainerConfig
from megatron_rl.engines import Engine, engine_of


@dataclass(frozen=True)
class TrainingConfig:
    """How the model of one role trains, every default filled in: a view of the sections `actor` and `critic`."""

    parallel: ParallelConfig
    optim: OptimConfig
    mini_batch_size: int
    """Prompts (SFT: sequences; preferences: rows) of one optimizer step."""
    micro_batch_size: int | None
    """Maximum sequences per forward pass and rank; None if there is no limit."""
    max_tokens_per_gpu: int
    epochs: int
    """Passes over the rollouts of one step."""
    loss_agg_mode: LossAggMode
    offloaded: tuple[str, ...]
    """What leaves the device outside the model's own passes: params, grads, optimizer."""


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
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def needs(self) -> Needs:
        """What the run's algorithm needs."""
        return ALGORITHMS[self.algorithm.name]

    @property
    def engine(self) -> Engine:
        """The rollout engine, and what it can do."""
        return engine_of(self.rollout.name)

    @property
    def samples_prompts(self) -> bool:
        """The run has an engine and a reward for validation alone."""
        return self.needs.samples_to_validate and bool(self.data.val_prompt_files)

    @property
    def has_engine(self) -> bool:
        """Engines sample responses: in training, or in validation alone."""
        return self.needs.rollouts or self.samples_prompts

    @property
    def has_rewards(self) -> bool:
        """Responses are scored: in training, or in validation alone."""
        return self.needs.rewards or self.samples_prompts

    @property
    def validates(self) -> bool:
        """There is something to validate on, and a step at which to do so."""
        return bool(self.data.val_files or self.samples_prompts) and self.trainer.test_freq != 0

    @property
    def judged_loss(self) -> JudgedLoss:
        """The loss of a run on preferences."""
        return self.algorithm.reward_loss if self.needs.reward_head else self.algorithm.loss

    @property
    def needs_reference(self) -> bool:
        """The run compares the policy with a frozen one."""
        if self.needs.preferences:
            return self.judged_loss.needs_reference
        return self.needs.rollouts and (self.actor.use_kl_loss or self.algorithm.use_kl_in_reward)

    @property
    def actor_training(self) -> TrainingConfig:
        """How the actor trains."""
        actor = self.actor
        return TrainingConfig(
            parallel=actor,
            optim=actor.optim,
            mini_batch_size=self.mini_batch_size,
            micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
            max_tokens_per_gpu=actor.max_tokens_per_gpu,
            epochs=actor.ppo_epochs,
            loss_agg_mode=actor.loss_agg_mode,
            offloaded=actor.offloaded,
        )

    @property
    def critic_training(self) -> TrainingConfig:
        """How the critic trains: by its own keys if they are set, else as the actor."""
        critic, actor = self.critic, self.actor_training
        recompute = self.actor.recompute if critic.recompute is None else critic.recompute
        return TrainingConfig(
            parallel=replace(self.actor, recompute=recompute),
            optim=critic.optim,
            mini_batch_size=critic.ppo_mini_batch_size or actor.mini_batch_size,
            micro_batch_size=critic.ppo_micro_batch_size_per_gpu or actor.micro_batch_size,
            max_tokens_per_gpu=critic.max_tokens_per_gpu or actor.max_tokens_per_gpu,
            epochs=critic.ppo_epochs or actor.epochs,
            loss_agg_mode=critic.loss_agg_mode,
            offloaded=critic.offloaded,
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
        """Prompts (SFT: sequences; preferences: rows) of one optimizer step."""
        size = self.actor.ppo_mini_batch_size if self.needs.rollouts else None
        return self.data.train_batch_size if size is None else size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of the actor in one step: mini-batches times epochs over them."""
        epochs = self.actor.ppo_epochs if self.needs.rollouts else 1
        return self.data.train_batch_size // self.mini_batch_size * epochs

    @property
    def critic_updates_per_step(self) -> int:
        """Optimizer updates in one step of a critic with a transformer of its own."""
        training = self.critic_training
        return self.data.train_batch_size // training.mini_batch_size * training.epochs

    @property
    def checkpoint_freq(self) -> int:
        """Steps between checkpoints; 0: none are written while the run goes on."""
        freq = self.checkpoint.freq
        return max(self.trainer.save_freq, 0) if freq is None else freq

    @property
    def sequences_together(self) -> int:
        """Sequences that share a forward pass in any case: those of a row of preferences."""
        return self.judged_loss.sequences_per_row if self.needs.preferences else 1

    @property
    def samples_per_prompt(self) -> int:
        """Sequences that one prompt (SFT and preferences: row) becomes. Those of a row of preferences stay together."""
        if self.needs.preferences:
            return self.judged_loss.sequences_per_row
        return self.rollout.n if self.needs.rollouts else 1
