"""Checks of a run with a critic: PPO and GAE belong together, and the critic fits the actor's ranks."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.checks.model import ModelShapes, weight_faults
from megatron_rl.config.checks.words import divisors, listed
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault
from megatron_rl.models.config_json import inspect_critic


def critic_belongs(cfg: RunConfig) -> list[Fault]:
    """algorithm.name ppo, adv_estimator gae and critic.enable come together."""
    name, estimator, enabled = cfg.algorithm.name, cfg.algorithm.adv_estimator, cfg.critic.enable
    chosen = cfg.algorithm.estimator_name
    if cfg.needs.critic:
        faults: list[Fault] = []
        if not estimator.needs_values:
            cure = "set algorithm.adv_estimator=gae, or algorithm.name=grpo, which runs the estimators without a critic"
            faults.append(Fault("algorithm.adv_estimator", chosen, "PPO's advantages come from a critic (GAE)", cure))
        if not enabled:
            reason = f"algorithm.name {name} needs values, and no critic is trained"
            cure = "set critic.enable=true (a flow may put anything in its place: trainer.flow.replace)"
            faults.append(Fault("critic.enable", False, reason, cure))
        return faults
    cure = "set algorithm.name=ppo, algorithm.adv_estimator=gae and critic.enable=true, or none of the three"
    faults = []
    if estimator.needs_values and cfg.needs.rollouts:
        faults.append(
            Fault("algorithm.adv_estimator", chosen, f"needs a critic, and algorithm.name {name} has none", cure)
        )
    if enabled:
        faults.append(Fault("critic.enable", True, f"algorithm.name {name} has no use for a critic", cure))
    return faults


def group_filters(cfg: RunConfig) -> list[Fault]:
    """What compares the samples of a prompt belongs to estimators that do."""
    if not cfg.needs.critic:
        return []
    given = {
        "algorithm.drop_flat_groups": cfg.algorithm.drop_flat_groups,
        "algorithm.filter_groups.enable": cfg.algorithm.filter_groups.enable,
    }
    reason = "compares the samples of a prompt; a critic's advantages do not, and no group is without them"
    return [Fault(key, True, reason, "set it to false, or algorithm.name=grpo") for key, on in given.items() if on]


def critic_layout(cfg: RunConfig) -> list[Fault]:
    """The critic is split over the ranks as the actor is."""
    if not cfg.critic.enable:
        return []
    critic, actor = cfg.critic, cfg.actor
    sizes: dict[str, tuple[int | None, int]] = {
        "tp": (critic.tp, actor.tp),
        "pp": (critic.pp, actor.pp),
        "cp": (critic.cp, actor.cp),
        "sequence_parallel": (critic.sequence_parallel, actor.sequence_parallel),
    }
    faults: list[Fault] = []
    for key, (own, actors) in sizes.items():
        if own is not None and own != actors:
            reason = f"the critic lives in the actor's process groups, and actor.{key} is {actors}"
            faults.append(Fault(f"critic.{key}", own, reason, "leave it out, or give both the same value"))
    return faults


def shared_backbone(cfg: RunConfig) -> list[Fault]:
    """One transformer has one start, one update and one optimizer."""
    critic = cfg.critic
    if not critic.enable or not critic.share_backbone:
        return []
    faults: list[Fault] = []
    if critic.path is not None:
        reason = "share_backbone has one transformer, and that starts from model.path"
        faults.append(Fault("critic.path", critic.path, reason, "leave it out, or set critic.share_backbone=false"))
    of_an_update = {
        "ppo_mini_batch_size": critic.ppo_mini_batch_size,
        "ppo_micro_batch_size_per_gpu": critic.ppo_micro_batch_size_per_gpu,
        "max_tokens_per_gpu": critic.max_tokens_per_gpu,
        "ppo_epochs": critic.ppo_epochs,
        "recompute": critic.recompute,
    }
    for key, value in of_an_update.items():
        if value is not None:
            reason = f"share_backbone makes one update for both, by actor.{key}"
            faults.append(Fault(f"critic.{key}", value, reason, "leave it out, or set critic.share_backbone=false"))
    if cfg.trainer.critic_warmup:
        reason = "share_backbone has no update of the critic alone: it would move the actor's transformer too"
        cure = "set it to 0, or critic.share_backbone=false"
        faults.append(Fault("trainer.critic_warmup", cfg.trainer.critic_warmup, reason, cure))
    return faults


def critic_sizes(cfg: RunConfig) -> list[Fault]:
    """The critic's mini-batches divide the batch, and the longest sequence fits into one of its passes."""
    critic, batch = cfg.critic, cfg.data.train_batch_size
    if not critic.enable:
        return []
    faults: list[Fault] = []
    mini = critic.ppo_mini_batch_size
    if mini is not None and batch % mini:
        near = listed([part for part in divisors(batch) if part <= mini][-2:])
        cure = f"use a divisor of {batch}, for instance {near}"
        reason = f"does not divide data.train_batch_size {batch}"
        faults.append(Fault("critic.ppo_mini_batch_size", mini, reason, cure))
    cp, longest, tokens = cfg.actor.cp, cfg.max_sequence_length, critic.max_tokens_per_gpu
    needed = longest if cp == 1 else -(-longest // (2 * cp)) * 2
    if tokens is not None and tokens < needed:
        reason = f"is less than the longest sequence, {cfg.max_sequence_length} tokens, needs of a rank"
        faults.append(Fault("critic.max_tokens_per_gpu", tokens, reason, f"raise it to at least {needed}"))
    return faults


def critic_warmup(cfg: RunConfig) -> list[Fault]:
    """Steps of the critic alone leave some for the actor."""
    warmup, steps = cfg.trainer.critic_warmup, cfg.trainer.total_training_steps
    if not warmup or not cfg.needs.critic or steps is None or warmup < steps:
        return []
    reason = f"the run has {steps} steps (trainer.total_training_steps): the actor is never updated"
    return [Fault("trainer.critic_warmup", warmup, reason, f"use less than {steps}")]


def critic_files(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """critic.path holds a supported model, whole, that knows the actor's vocabulary and fits its layout."""
    path, actor = cfg.critic.path, cfg.actor
    if not cfg.critic.enable or path is None:
        return []
    shape, _, faults = inspect_critic(path)
    if shape is None:
        return faults
    actors = models.actor(cfg)
    if actors is not None and shape.vocab_size < actors.vocab_size:
        reason = f"its vocabulary of {shape.vocab_size} is smaller than the actor's of {actors.vocab_size}"
        faults.append(Fault("critic.path", path, reason, "use a model with the actor's tokenizer"))
    if shape.max_position_embeddings < cfg.max_sequence_length:
        reason = f"it knows {shape.max_position_embeddings} positions, a sequence may have {cfg.max_sequence_length}"
        faults.append(Fault("critic.path", path, reason, "use a model with more positions, or shorter lengths"))
    if actor.tp not in shape.tp_choices():
        reason = f"its heads and MLP do not divide by actor.tp {actor.tp}"
        faults.append(Fault("critic.path", path, reason, f"use actor.tp {listed(shape.tp_choices())}"))
    if shape.num_layers % (actor.pp * actor.vpp):
        reason = f"its {shape.num_layers} layers do not divide by actor.pp * actor.vpp = {actor.pp * actor.vpp}"
        faults.append(Fault("critic.path", path, reason, "use a model whose layers do"))
    uneven = actor.num_layers_in_first_pipeline_stage or actor.num_layers_in_last_pipeline_stage
    if uneven and actors is not None and shape.num_layers != actors.num_layers:
        reason = f"it has {shape.num_layers} layers, and the uneven stages are made for the actor's {actors.num_layers}"
        faults.append(Fault("critic.path", path, reason, "use even stages, or a critic with the actor's layers"))
    if bool(shape.num_experts) != bool(actors and actors.num_experts) or shape.num_experts % actor.ep:
        reason = f"it has {shape.num_experts} experts a layer, which the actor's layout is not made for"
        faults.append(Fault("critic.path", path, reason, "use a critic of the actor's kind"))
    return [*faults, *weight_faults(str(Path(path)), "critic.path", None)]
