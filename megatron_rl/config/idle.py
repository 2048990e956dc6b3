"""Settings that were changed and that nothing in this run reads.

Not errors: it is usual to switch a KL term off by one key and leave its coefficient where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.load import run_schema, to_dict, value_of
from megatron_rl.config.run import RunConfig

_RL_ONLY = (
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.clip_ratio",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.loss_mode",
    "actor.entropy_coeff",
    "actor.use_kl_loss",
    "actor.param_offload",
    "actor.grad_offload",
    "actor.optimizer_offload",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "algorithm.drop_flat_groups",
)


@dataclass(frozen=True)
class Idle:
    """A changed setting without effect, and why."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}  ({self.why})"


def idle_settings(cfg: RunConfig) -> list[Idle]:
    """Keys that differ from their default and have no effect in this run."""
    schema, tree = run_schema(), to_dict(cfg)
    settings = [(key, value_of(tree, key), why) for key, why in _unread(cfg)]
    return [Idle(key, value, why) for key, value, why in settings if value != schema.keys[key].default]


def _unread(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    if not cfg.is_rl:
        yield from ((key, "SFT does not read it") for key in _RL_ONLY)
    if not cfg.actor.use_kl_loss:
        yield from ((f"actor.{key}", "actor.use_kl_loss is off") for key in ("kl_loss_coef", "kl_loss_type"))
    if not cfg.algorithm.use_kl_in_reward:
        yield from ((f"algorithm.{key}", "algorithm.use_kl_in_reward is off") for key in ("kl_coef", "kl_penalty"))
    if cfg.actor.clip_ratio_low is not None and cfg.actor.clip_ratio_high is not None:
        yield "actor.clip_ratio", "clip_ratio_low and clip_ratio_high decide"
    if cfg.actor.optim.lr_scheduler == "constant":
        yield from (
            (f"actor.optim.{key}", "lr_scheduler is constant: the rate does not decay")
            for key in ("min_lr_ratio", "lr_decay_steps")
        )
    if cfg.rollout.name != "vllm":
        yield from (
            (f"rollout.{key}", "only vLLM reads it")
            for key in ("gpu_memory_utilization", "kv_cache_gb", "max_num_batched_tokens", "enforce_eager")
        )
    if cfg.cluster.backend == "inline":
        yield "cluster.num_cpus_per_rank", "cluster.backend is inline"
