"""The whole run: its sections, the sizes that follow from them, and the checks that span them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from megatron_rl.config import algos, checks, files, folders, ppo, reward_checks
from megatron_rl.config.actor import ActorConfig, RefConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.base import section
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.config.engine_keywords import engine_keywords
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import Fault


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
    def is_rl(self) -> bool:
        """The run generates and scores responses."""
        return self.algorithm.name != "sft"

    @property
    def needs_reference(self) -> bool:
        """The run compares the policy with a frozen one."""
        return self.is_rl and (self.actor.use_kl_loss or self.algorithm.use_kl_in_reward)

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
        size = self.actor.ppo_mini_batch_size if self.is_rl else None
        return self.data.train_batch_size if size is None else size

    @property
    def samples_per_prompt(self) -> int:
        """Sequences that one prompt (SFT: row) becomes."""
        return self.rollout.n if self.is_rl else 1


Verb = Literal["train", "eval", "export"]
"""What a config is resolved for: `check` and `plan` look at it as `train` does."""


@dataclass(frozen=True)
class Check:
    """A check and the keys it reads; it says nothing when one of them could not be read itself."""

    reads: tuple[str, ...]
    run: Callable[[RunConfig], list[Fault]]
    verbs: tuple[Verb, ...] = ("train", "eval", "export")
    """Verbs that use what the check looks at: an export needs neither data nor a reward."""


_WORLD = ("cluster.nnodes", "cluster.n_gpus_per_node")
_MODEL_PARALLEL = ("actor.tp", "actor.pp", "actor.cp")
_STAGES = ("actor.pp", "actor.num_layers_in_first_pipeline_stage", "actor.num_layers_in_last_pipeline_stage")
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_GROUP_FILTERS = ("algorithm.drop_flat_groups", "algorithm.filter_groups.enable")
_CORRECTION = tuple(
    f"algorithm.rollout_correction.{key}"
    for key in (
        *("rollout_is", "rollout_is_threshold", "rollout_is_threshold_lower", "bypass_mode"),
        *("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold"),
    )
)
_BATCH = ("algorithm.name", "data.train_batch_size", "actor.ppo_mini_batch_size")
_REWARD = ("algorithm.name", "reward.function", "reward.kwargs", "reward.parts", "reward.by_source")
_KL = ("algorithm.name", "actor.use_kl_loss", "algorithm.use_kl_in_reward")
_LAYOUT_KEYS = ("tp", "pp", "cp", "sequence_parallel")
_CRITIC_LAYOUT = ("critic.enable", *(f"{part}.{key}" for part in ("actor", "critic") for key in _LAYOUT_KEYS))
_CRITIC_SIZES = (
    "critic.enable",
    "critic.ppo_mini_batch_size",
    "critic.max_tokens_per_gpu",
    "data.train_batch_size",
    "actor.cp",
    *_LENGTHS,
)
_SHARED = (
    *(f"critic.{key}" for key in ("enable", "share_backbone", "path", "recompute", "ppo_epochs")),
    *("critic.ppo_mini_batch_size", "critic.ppo_micro_batch_size_per_gpu", "critic.max_tokens_per_gpu"),
    "trainer.critic_warmup",
)
_CRITIC_FILES = ("critic.enable", "critic.path", "model.path", "actor.tp", "actor.vpp", "actor.ep", *_STAGES, *_LENGTHS)

CHECKS: tuple[Check, ...] = (
    Check(("actor.pp", "actor.vpp"), checks.virtual_pipeline),
    Check(_STAGES, checks.uneven_pipeline),
    Check((*_WORLD, "actor.tp", "actor.pp", "actor.ep", "actor.etp"), checks.expert_layout),
    Check(("algorithm.name", "algorithm.adv_estimator", "critic.enable"), ppo.critic_belongs),
    Check(("algorithm.name", *_GROUP_FILTERS), ppo.group_filters),
    Check(_CRITIC_LAYOUT, ppo.critic_layout),
    Check(_SHARED, ppo.shared_backbone),
    Check(_CRITIC_SIZES, ppo.critic_sizes),
    Check(("algorithm.name", "trainer.critic_warmup", "trainer.total_training_steps"), ppo.critic_warmup),
    Check((*_WORLD, *_MODEL_PARALLEL), checks.actor_layout),
    Check((*_WORLD, "algorithm.name", "rollout.name", "rollout.tp"), checks.engine_layout),
    Check(("rollout.engine_kwargs", "rollout.name"), engine_keywords),
    Check(("rollout.stop",), checks.stop_texts),
    Check(
        tuple(f"{section}.apply_chat_template_kwargs" for section in ("data", "reward.model", "reward.judge")),
        checks.template_keywords,
    ),
    Check((*_WORLD, "cluster.backend"), checks.inline_backend),
    Check(("cluster.backend", "cluster.ray_address", "cluster.ray_port"), checks.ray_address),
    Check(("actor.tp", "actor.sequence_parallel"), checks.sequence_parallel),
    Check(
        ("actor.use_distributed_optimizer", "actor.overlap_grad_reduce", "actor.overlap_param_gather"),
        checks.overlapped_gather,
    ),
    Check(("actor.vpp", "actor.overlap_grad_reduce", "actor.overlap_param_gather"), checks.overlapped_chunks),
    Check(_BATCH, checks.mini_batches),
    Check((*_BATCH, *_WORLD, *_MODEL_PARALLEL, "rollout.n"), checks.ranks_have_work),
    Check((*_LENGTHS, "actor.max_tokens_per_gpu", "actor.cp"), checks.token_budget),
    Check((*_LENGTHS, "algorithm.name", "rollout.max_model_len"), checks.engine_length),
    Check(
        ("algorithm.name", "algorithm.adv_estimator", "rollout.n", *_GROUP_FILTERS),
        algos.group_size,
    ),
    Check(("algorithm.name", "actor.clip_ratio", "actor.clip_ratio_low"), algos.clip_range),
    Check(
        ("algorithm.name", "algorithm.overlong_buffer.enable", "algorithm.overlong_buffer.len", _LENGTHS[1]),
        algos.overlong_buffer,
    ),
    Check(("algorithm.name", *_CORRECTION), algos.rollout_correction),
    Check(("algorithm.adv_estimator",), checks.adv_estimator),
    Check(("actor.loss_mode",), checks.loss_mode),
    Check(("algorithm.name", "rollout.top_p"), checks.top_p),
    Check(("algorithm.name", "rollout.top_k"), checks.top_k),
    Check(
        ("algorithm.name", "data.val_files", "rollout.val.n", "rollout.val.temperature"),
        checks.validation_samples,
        ("train", "eval"),
    ),
    Check(("algorithm.name", "trainer.target_loss"), checks.target_loss),
    Check(("trainer.test_freq", "data.val_files"), checks.validation, ("train",)),
    Check((*_KL, "ref.path"), checks.reference),
    Check(("actor.optim.lr_warmup_steps", "actor.optim.lr_decay_steps"), checks.decay_after_warmup),
    Check(
        (*_BATCH, "actor.ppo_epochs", "trainer.total_training_steps", "actor.optim.lr_warmup_steps"),
        checks.warmup_ends,
    ),
    Check(("data.train_files",), files.train_files, ("train",)),
    Check(("data.val_files",), files.val_files, ("train", "eval")),
    Check(("data.val_files",), files.eval_files, ("eval",)),
    Check(_REWARD, reward_checks.reward_functions, ("train", "eval")),
    Check((*_REWARD, "reward.failed_score"), reward_checks.reward_numbers, ("train", "eval")),
    Check(_REWARD, reward_checks.reward_workers, ("train", "eval")),
    Check(("model.path",), files.model),
    Check(_CRITIC_FILES, ppo.critic_files),
    Check(("model.path", "model.init"), files.weights),
    Check(("model.path", "model.tokenizer_path"), files.tokenizer),
    Check(("model.path", "model.tokenizer_path"), files.vocabulary),
    Check((*_KL, "ref.path"), files.reference),
    Check(("model.path", "actor.tp"), files.tensor_parallel),
    Check(("model.path", *_WORLD, "algorithm.name", "rollout.name", "rollout.tp"), files.engine_parallel),
    Check(("model.path", "actor.tp", "actor.ep", "actor.etp", "actor.sequence_parallel"), files.experts),
    Check(("model.path", "actor.vpp", *_STAGES), files.pipeline_stages),
    Check(("model.path", "algorithm.name", "rollout.name"), files.head_dim),
    Check(("trainer.default_local_dir", "trainer.experiment_name"), folders.run_folder, ("train", "eval")),
    Check(("model.path", *_LENGTHS), files.positions, ("train", "eval")),
    Check(("model.path", "algorithm.name", "rollout.max_model_len"), files.engine_positions, ("train", "eval")),
)


def cross_faults(cfg: RunConfig, unreadable: frozenset[str] = frozenset(), verb: Verb = "train") -> list[Fault]:
    """Everything wrong with `cfg` that no single section can see: sizes, layout, names, files, model shape.

    verb: what the config is for; checks of what that does not use are left out.
    unreadable: keys whose own value is wrong already; checks that read one of them are left out.
    Reads what the config names (config.json, the index of weight files, a reward file), no data, no weights.
    """
    return [
        fault
        for check in CHECKS
        if verb in check.verbs and not unreadable & set(check.reads)
        for fault in check.run(cfg)
    ]
