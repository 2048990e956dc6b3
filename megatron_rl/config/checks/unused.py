"""Settings that were changed and that nothing in this run reads.

Not errors: it is usual to switch a KL term off by one key and leave its coefficient where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.algos.losses.base import ClipRange
from megatron_rl.config.checks import algorithm as algos
from megatron_rl.config.checks import reward as reward_checks
from megatron_rl.config.load import run_schema, settings_of
from megatron_rl.config.run import RunConfig
from megatron_rl.config.text.reader import NoEffect
from megatron_rl.engines import OPTIONAL_SETTINGS

_OF_ROLLOUTS = (
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.entropy_coeff",
    "actor.use_kl_loss",
    "actor.param_offload",
    "actor.grad_offload",
    "actor.optimizer_offload",
    "algorithm.use_kl_in_reward",
    "algorithm.drop_flat_groups",
    "algorithm.overlong_filtering",
    "algorithm.overlong_buffer.enable",
    "algorithm.filter_groups.enable",
    "actor.kl_loss_importance",
    "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_token_veto_threshold",
    "algorithm.rollout_correction.bypass_mode",
    "data.label_key",
    "data.metadata_key",
)

_OF_ENGINE = (
    "actor.param_offload",
    "actor.grad_offload",
    "actor.optimizer_offload",
    "data.label_key",
    "data.metadata_key",
)
"""Those that an engine for validation alone reads."""
_CHOICES = ("actor.loss.", "algorithm.adv_estimator.")
_KL_IN_REWARD = ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef", "kl_ctrl.target_kl", "kl_ctrl.horizon")
_OF_CRITIC = ("trainer.critic_warmup",)
_CRITICS_UPDATE = ("loss_agg_mode", "param_offload", "grad_offload", "optimizer_offload")


def idle_settings(cfg: RunConfig) -> list[NoEffect]:
    """Keys that differ from their default and have no effect in this run."""
    settings = {key.name: (value, key.default) for key, value in settings_of(cfg)}
    unread = (*_unread(cfg), *algos.unread(cfg), *reward_checks.unread(cfg))
    unlike = [(key, *settings[key], why) for key, why in unread]
    return [NoEffect(key, value, why) for key, value, default, why in unlike if value != default]


def _unread(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    if not cfg.needs.rollouts:
        chosen = [key.name for key, _ in settings_of(cfg) if key.name.startswith(_CHOICES)]
        why = f"algorithm.name {cfg.algorithm.name} does not read it"
        own = ("data.label_key",) if cfg.needs.preferences and cfg.judged_loss.rows != "pairs" else ()
        own += _OF_ENGINE if cfg.samples_prompts else ()
        yield from ((key, why) for key in (*_OF_ROLLOUTS, *chosen) if key not in own)
    yield from (*_unread_of_preferences(cfg), *_unread_of_profile(cfg))
    if not cfg.actor.use_kl_loss:
        yield from ((f"actor.{key}", "actor.use_kl_loss is off") for key in ("kl_loss_coef", "kl_loss_type"))
    if not cfg.algorithm.use_kl_in_reward:
        yield from ((f"algorithm.{key}", "algorithm.use_kl_in_reward is off") for key in _KL_IN_REWARD)
    yield from ((f"critic.{key}", why) for key, why in _unread_of_critic(cfg))
    if cfg.trainer.early_stop.metric is None:
        names = ("mode", "patience", "min_delta")
        yield from ((f"trainer.early_stop.{name}", "trainer.early_stop.metric is unset") for name in names)
    if not cfg.needs.critic:
        yield from ((key, "only an algorithm with a critic reads it") for key in _OF_CRITIC)
    loss = cfg.actor.loss
    if isinstance(loss, ClipRange) and loss.clip_ratio_low is not None and loss.clip_ratio_high is not None:
        yield "actor.loss.clip_ratio", "clip_ratio_low and clip_ratio_high decide"
    if cfg.actor.optim.lr_scheduler == "constant":
        yield from (
            (f"actor.optim.{key}", "lr_scheduler is constant: the rate does not decay")
            for key in ("min_lr_ratio", "lr_decay_steps")
        )
    for name, optim in (("actor", cfg.actor.optim), ("critic", cfg.critic.optim)):
        if optim.lr_warmup_steps:
            yield f"{name}.optim.lr_warmup_steps_ratio", "lr_warmup_steps decides"
    if not cfg.actor.overlap_grad_reduce:
        yield "actor.overlap_bucket_size", "actor.overlap_grad_reduce is off"
    if cfg.dp_size * cfg.actor.cp == 1:
        yield from ((f"actor.overlap_{what}", "one rank has each weight") for what in ("grad_reduce", "param_gather"))
    yield from ((f"rollout.{key}", why) for key, why in _unread_of_rollout(cfg))
    yield from ((f"cluster.{key}", why) for key, why in _unread_of_cluster(cfg))


def _unread_of_preferences(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    preferences, why = cfg.needs.preferences, f"algorithm.name {cfg.algorithm.name} does not read it"
    if preferences:
        yield "actor.loss_agg_mode", "losses of preferences are averaged over rows"
    else:
        yield from ((f"data.{key}", why) for key in ("chosen_key", "rejected_key"))
    if not preferences or not cfg.judged_loss.reads_margins:
        yield "data.margin_key", "only the pairs of a reward model have margins"
    for section, reads in (("loss", not cfg.needs.reward_head), ("reward_loss", cfg.needs.reward_head)):
        if not (preferences and reads):
            names = [key.name for key, _ in settings_of(cfg) if key.name.startswith(f"algorithm.{section}.")]
            yield from ((key, why) for key in names)


def _unread_of_profile(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    if not cfg.trainer.profile.steps:
        yield "trainer.profile.ranks", "trainer.profile.steps is empty"


def _unread_of_cluster(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    cluster = cfg.cluster
    if cluster.backend == "inline":
        yield from ((key, "cluster.backend is inline") for key in ("num_cpus_per_rank", "check_links", "expected_gbps"))
    elif cluster.nnodes == 1 or not cluster.measures_links:
        yield "expected_gbps", "no link between nodes is measured"


def _unread_of_rollout(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    rollout, engine = cfg.rollout, cfg.engine
    unread = [key for key in OPTIONAL_SETTINGS if key not in engine.settings]
    unread += [] if engine.shares_weights else ["share_weights"]
    yield from ((key, f"the engine {engine.name} does not read it") for key in unread)
    if engine.takes_whole_tensors:
        what = "takes whole tensors" if engine.runs_model else "has no weights"
        yield from ((key, f"the engine {engine.name} {what}") for key in ("weight_sync", "sync_bucket_mb"))
    elif rollout.weight_sync == "full":
        keys = ("share_weights", "sync_bucket_mb") if engine.shares_weights else ("sync_bucket_mb",)
        yield from ((key, "rollout.weight_sync is full") for key in keys)
    elif cfg.world_size == 1:
        yield "sync_bucket_mb", "one rank: no weights go from rank to rank"
    if rollout.val.n == 1:
        yield "val.pass_score", "rollout.val.n is 1, and pass@k is of several samples"


def _unread_of_critic(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    keys = [key.removeprefix("critic.") for key in run_schema().keys if key.startswith("critic.")]
    if not cfg.critic.enable:
        yield from ((key, "critic.enable is off") for key in keys)
    elif cfg.critic.share_backbone:
        idle = [*_CRITICS_UPDATE, *(key for key in keys if key.startswith("optim."))]
        yield from ((key, "critic.share_backbone: the actor's update trains both") for key in idle)
    else:
        yield "vf_coef", "critic.share_backbone is off"
        if cfg.critic.optim.lr_scheduler == "constant":
            idle = ("optim.min_lr_ratio", "optim.lr_decay_steps")
            yield from ((key, "lr_scheduler is constant: the rate does not decay") for key in idle)
