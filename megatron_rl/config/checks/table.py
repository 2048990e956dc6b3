"""The checks that span sections, in the order in which their faults are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.checks import (
    algorithm,
    batch,
    checkpoint,
    critic,
    data_paths,
    engine,
    folders,
    layout,
    lora,
    model,
    reward,
    sampling,
    schedule,
)
from megatron_rl.config.checks.model import ModelShapes
from megatron_rl.config.checks.recorder import recorded
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault

Verb = Literal["train", "eval", "export"]
"""What a config is resolved for: `check` and `plan` look at it as `train` does."""


@dataclass(frozen=True)
class Check:
    """A check of the config alone."""

    run: Callable[[RunConfig], list[Fault]]
    verbs: tuple[Verb, ...] = ("train", "eval", "export")
    """Verbs that use what the check looks at: an export needs neither data nor a reward."""


@dataclass(frozen=True)
class ModelCheck:
    """A check that looks at the shape of the run's models too."""

    run: Callable[[RunConfig, ModelShapes], list[Fault]]
    verbs: tuple[Verb, ...] = ("train", "eval", "export")


CHECKS: tuple[Check | ModelCheck, ...] = (
    Check(layout.virtual_pipeline),
    Check(layout.uneven_pipeline),
    Check(layout.expert_layout),
    Check(critic.critic_belongs),
    Check(critic.group_filters),
    Check(critic.critic_layout),
    Check(critic.shared_backbone),
    Check(critic.critic_sizes),
    Check(critic.critic_warmup),
    Check(layout.actor_layout),
    Check(engine.engine_path),
    Check(engine.engine_layout),
    Check(engine.engine_experts),
    Check(engine.router_replay),
    Check(engine.engine_keywords),
    Check(sampling.stop_texts),
    Check(sampling.template_keywords),
    Check(layout.inline_backend),
    Check(layout.ray_address),
    Check(layout.groups_on_one_node),
    Check(layout.single_node),
    Check(layout.sequence_parallel),
    Check(layout.overlapped_gather),
    Check(layout.overlapped_chunks),
    Check(batch.mini_batches),
    Check(batch.ranks_have_work),
    Check(batch.rows_stay_whole),
    Check(batch.token_budget),
    Check(engine.engine_length),
    Check(algorithm.group_size),
    Check(algorithm.clip_range),
    Check(algorithm.overlong_buffer),
    Check(algorithm.rollout_correction),
    Check(sampling.top_p),
    Check(sampling.top_k),
    Check(sampling.validation_samples, ("train", "eval")),
    Check(schedule.target_loss),
    Check(schedule.validation, ("train",)),
    Check(schedule.staleness, ("train",)),
    Check(schedule.profile, ("train",)),
    Check(schedule.max_time, ("train",)),
    Check(checkpoint.best_metric, ("train",)),
    Check(checkpoint.early_stop, ("train",)),
    Check(checkpoint.resume_path, ("train",)),
    Check(checkpoint.resume_changes, ("train",)),
    Check(checkpoint.restarts, ("train",)),
    Check(model.unused_reference),
    Check(lora.lora_off),
    Check(lora.lora_belongs),
    Check(lora.lora_sync),
    Check(schedule.decay_after_warmup),
    Check(schedule.warmup_ends),
    Check(data_paths.train_files, ("train",)),
    Check(data_paths.val_files, ("train", "eval")),
    Check(data_paths.val_prompt_files, ("train", "eval")),
    Check(data_paths.eval_files, ("eval",)),
    Check(reward.reward_functions, ("train", "eval")),
    Check(reward.failed_score, ("train", "eval")),
    Check(reward.judge_range, ("train", "eval")),
    Check(reward.reward_numbers, ("train", "eval")),
    Check(reward.reward_model, ("train", "eval")),
    ModelCheck(reward.judge, ("train", "eval")),
    ModelCheck(model.model),
    ModelCheck(critic.critic_files),
    ModelCheck(model.weights),
    ModelCheck(model.tokenizer),
    Check(model.chat_template),
    ModelCheck(model.reference),
    ModelCheck(lora.lora_targets),
    ModelCheck(lora.lora_path),
    ModelCheck(layout.tensor_parallel),
    ModelCheck(engine.engine_parallel),
    ModelCheck(layout.experts),
    ModelCheck(engine.routers),
    ModelCheck(engine.float32_routers),
    ModelCheck(layout.pipeline_stages),
    ModelCheck(engine.head_dim),
    Check(folders.run_folder, ("train", "eval")),
    ModelCheck(batch.positions, ("train", "eval")),
    ModelCheck(engine.engine_positions, ("train", "eval")),
)


def run_check(
    check: Check | ModelCheck, cfg: RunConfig, models: ModelShapes, unreadable: frozenset[str] = frozenset()
) -> tuple[list[Fault], frozenset[str]]:
    """(faults, keys that the check read). No faults, and the keys so far, if it reads a key of `unreadable`."""
    if isinstance(check, Check):
        return recorded(check.run, cfg, unreadable)
    run = check.run
    return recorded(lambda view: run(view, models), cfg, unreadable)


def cross_faults(cfg: RunConfig, unreadable: frozenset[str] = frozenset(), verb: Verb = "train") -> list[Fault]:
    """Everything wrong with `cfg` that no single section can see: sizes, layout, names, files, model shape.

    verb: what the config is for; checks of what that does not use are left out.
    unreadable: keys whose own value is wrong already; a check that reads one of them is left out.
    Reads what the config names (config.json, the index of weight files, a reward file), no data, no weights.
    """
    models = ModelShapes()
    return [fault for check in CHECKS if verb in check.verbs for fault in run_check(check, cfg, models, unreadable)[0]]
