"""The checks that span sections: each with the keys that it reads and the verbs that need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.checks import algorithm, critic, engine, folders, model, reward, run
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault

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
    Check(("actor.pp", "actor.vpp"), run.virtual_pipeline),
    Check(_STAGES, run.uneven_pipeline),
    Check((*_WORLD, "actor.tp", "actor.pp", "actor.ep", "actor.etp"), run.expert_layout),
    Check(("algorithm.name", "algorithm.adv_estimator", "critic.enable"), critic.critic_belongs),
    Check(("algorithm.name", *_GROUP_FILTERS), critic.group_filters),
    Check(_CRITIC_LAYOUT, critic.critic_layout),
    Check(_SHARED, critic.shared_backbone),
    Check(_CRITIC_SIZES, critic.critic_sizes),
    Check(("algorithm.name", "trainer.critic_warmup", "trainer.total_training_steps"), critic.critic_warmup),
    Check((*_WORLD, *_MODEL_PARALLEL), run.actor_layout),
    Check((*_WORLD, "algorithm.name", "rollout.name", "rollout.tp"), engine.engine_layout),
    Check(("rollout.engine_kwargs", "rollout.name"), engine.engine_keywords),
    Check(("rollout.stop",), engine.stop_texts),
    Check(
        tuple(f"{section}.apply_chat_template_kwargs" for section in ("data", "reward.model", "reward.judge")),
        run.template_keywords,
    ),
    Check((*_WORLD, "cluster.backend"), run.inline_backend),
    Check(("cluster.backend", "cluster.ray_address", "cluster.ray_port"), run.ray_address),
    Check(("actor.tp", "actor.sequence_parallel"), run.sequence_parallel),
    Check(
        ("actor.use_distributed_optimizer", "actor.overlap_grad_reduce", "actor.overlap_param_gather"),
        run.overlapped_gather,
    ),
    Check(("actor.vpp", "actor.overlap_grad_reduce", "actor.overlap_param_gather"), run.overlapped_chunks),
    Check(_BATCH, run.mini_batches),
    Check((*_BATCH, *_WORLD, *_MODEL_PARALLEL, "rollout.n"), run.ranks_have_work),
    Check((*_LENGTHS, "actor.max_tokens_per_gpu", "actor.cp"), run.token_budget),
    Check((*_LENGTHS, "algorithm.name", "rollout.max_model_len"), engine.engine_length),
    Check(
        ("algorithm.name", "algorithm.adv_estimator", "rollout.n", *_GROUP_FILTERS),
        algorithm.group_size,
    ),
    Check(("algorithm.name", "actor.clip_ratio", "actor.clip_ratio_low"), algorithm.clip_range),
    Check(
        ("algorithm.name", "algorithm.overlong_buffer.enable", "algorithm.overlong_buffer.len", _LENGTHS[1]),
        algorithm.overlong_buffer,
    ),
    Check(("algorithm.name", *_CORRECTION), algorithm.rollout_correction),
    Check(("algorithm.name", "rollout.top_p"), run.top_p),
    Check(("algorithm.name", "rollout.top_k"), run.top_k),
    Check(
        ("algorithm.name", "data.val_files", "rollout.val.n", "rollout.val.temperature"),
        run.validation_samples,
        ("train", "eval"),
    ),
    Check(("algorithm.name", "trainer.target_loss"), run.target_loss),
    Check(("trainer.test_freq", "data.val_files"), run.validation, ("train",)),
    Check((*_KL, "ref.path"), run.reference),
    Check(("actor.optim.lr_warmup_steps", "actor.optim.lr_decay_steps"), run.decay_after_warmup),
    Check(
        (*_BATCH, "actor.ppo_epochs", "trainer.total_training_steps", "actor.optim.lr_warmup_steps"),
        run.warmup_ends,
    ),
    Check(("data.train_files",), model.train_files, ("train",)),
    Check(("data.val_files",), model.val_files, ("train", "eval")),
    Check(("data.val_files",), model.eval_files, ("eval",)),
    Check(_REWARD, reward.reward_functions, ("train", "eval")),
    Check((*_REWARD, "reward.failed_score"), reward.reward_numbers, ("train", "eval")),
    Check(_REWARD, reward.reward_workers, ("train", "eval")),
    Check(("model.path",), model.model),
    Check(_CRITIC_FILES, critic.critic_files),
    Check(("model.path", "model.init"), model.weights),
    Check(("model.path", "model.tokenizer_path"), model.tokenizer),
    Check(("model.path", "model.tokenizer_path"), model.vocabulary),
    Check((*_KL, "ref.path"), model.reference),
    Check(("model.path", "actor.tp"), model.tensor_parallel),
    Check(("model.path", *_WORLD, "algorithm.name", "rollout.name", "rollout.tp"), engine.engine_parallel),
    Check(("model.path", "actor.tp", "actor.ep", "actor.etp", "actor.sequence_parallel"), model.experts),
    Check(("model.path", "actor.vpp", *_STAGES), model.pipeline_stages),
    Check(("model.path", "algorithm.name", "rollout.name"), engine.head_dim),
    Check(("trainer.default_local_dir", "trainer.experiment_name"), folders.run_folder, ("train", "eval")),
    Check(("model.path", *_LENGTHS), model.positions, ("train", "eval")),
    Check(("model.path", "algorithm.name", "rollout.max_model_len"), engine.engine_positions, ("train", "eval")),
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
