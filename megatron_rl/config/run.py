"""The whole run: its sections, the sizes that follow from them, and the checks that span them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from megatron_rl.config import checks, files
from megatron_rl.config.actor import ActorConfig, CriticConfig, RefConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.base import section
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import Fault


@section
class RunConfig:
    """Everything a run is told. Frozen; every value is in force as it stands here."""

    model: ModelConfig
    data: DataConfig
    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def is_rl(self) -> bool:
        """The run generates and scores responses."""
        return self.algorithm.name != "sft"

    @property
    def needs_reference(self) -> bool:
        """The run compares the policy with a frozen one."""
        return self.is_rl and (self.actor.use_kl_loss or self.algorithm.use_kl_in_reward)

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
        size = self.actor.ppo_mini_batch_size if self.is_rl else None
        return self.data.train_batch_size if size is None else size

    @property
    def samples_per_prompt(self) -> int:
        """Sequences that one prompt (SFT: row) becomes."""
        return self.rollout.n if self.is_rl else 1


@dataclass(frozen=True)
class Check:
    """A check and the keys it reads; it says nothing when one of them could not be read itself."""

    reads: tuple[str, ...]
    run: Callable[[RunConfig], list[Fault]]


_WORLD = ("cluster.nnodes", "cluster.n_gpus_per_node")
_MODEL_PARALLEL = ("actor.tp", "actor.pp", "actor.cp")
_STAGES = ("actor.pp", "actor.num_layers_in_first_pipeline_stage", "actor.num_layers_in_last_pipeline_stage")
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_BATCH = ("algorithm.name", "data.train_batch_size", "actor.ppo_mini_batch_size")
_KL = ("algorithm.name", "actor.use_kl_loss", "algorithm.use_kl_in_reward")

CHECKS: tuple[Check, ...] = (
    Check(("actor.pp", "actor.vpp"), checks.virtual_pipeline),
    Check(_STAGES, checks.uneven_pipeline),
    Check((*_WORLD, "actor.tp", "actor.pp", "actor.ep", "actor.etp"), checks.expert_layout),
    Check(("critic.enable",), checks.critic),
    Check((*_WORLD, *_MODEL_PARALLEL), checks.actor_layout),
    Check((*_WORLD, "algorithm.name", "rollout.tp"), checks.engine_layout),
    Check((*_WORLD, "cluster.backend"), checks.inline_backend),
    Check(("cluster.backend", "cluster.ray_address", "cluster.ray_port"), checks.ray_address),
    Check(("actor.tp", "actor.sequence_parallel"), checks.sequence_parallel),
    Check(_BATCH, checks.mini_batches),
    Check((*_BATCH, *_WORLD, *_MODEL_PARALLEL, "rollout.n"), checks.ranks_have_work),
    Check((*_LENGTHS, "actor.max_tokens_per_gpu", "actor.cp"), checks.token_budget),
    Check((*_LENGTHS, "algorithm.name", "rollout.max_model_len"), checks.engine_length),
    Check(("algorithm.name", "algorithm.adv_estimator", "rollout.n"), checks.group_size),
    Check(("algorithm.adv_estimator",), checks.adv_estimator),
    Check(("actor.loss_mode",), checks.loss_mode),
    Check(("algorithm.name", "rollout.top_p"), checks.top_p),
    Check(("algorithm.name", "rollout.top_k"), checks.top_k),
    Check(("algorithm.name", "trainer.target_loss"), checks.target_loss),
    Check(("trainer.test_freq", "data.val_files"), checks.validation),
    Check((*_KL, "ref.path"), checks.reference),
    Check(("actor.optim.lr_warmup_steps", "actor.optim.lr_decay_steps"), checks.decay_after_warmup),
    Check(
        (*_BATCH, "actor.ppo_epochs", "trainer.total_training_steps", "actor.optim.lr_warmup_steps"),
        checks.warmup_ends,
    ),
    Check(("data.train_files",), files.train_files),
    Check(("data.val_files",), files.val_files),
    Check(("algorithm.name", "reward.function"), files.reward_function),
    Check(("model.path",), files.model),
    Check(("model.path", "model.init"), files.weights),
    Check(("model.path", "model.tokenizer_path"), files.tokenizer),
    Check((*_KL, "ref.path"), files.reference),
    Check(("model.path", "actor.tp"), files.tensor_parallel),
    Check(("model.path", "actor.tp", "actor.ep", "actor.etp", "actor.sequence_parallel"), files.experts),
    Check(("model.path", "actor.vpp", *_STAGES), files.pipeline_stages),
    Check(("model.path", "algorithm.name", "rollout.name"), files.head_dim),
    Check(("model.path", *_LENGTHS), files.positions),
    Check(("model.path", "algorithm.name", "rollout.max_model_len"), files.engine_positions),
)


def cross_faults(cfg: RunConfig, unreadable: frozenset[str] = frozenset()) -> list[Fault]:
    """Everything wrong with `cfg` that no single section can see: sizes, layout, names, files, model shape.

    unreadable: keys whose own value is wrong already; checks that read one of them are left out.
    Reads what the config names (config.json, the index of weight files, a reward file), no data, no weights.
    """
    return [fault for check in CHECKS if not unreadable & set(check.reads) for fault in check.run(cfg)]
