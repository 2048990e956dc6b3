"""Checks of how prompts are written and responses are sampled."""

from __future__ import annotations

from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.data import RESERVED_KEYWORDS
from megatron_rl.errors import Fault


def _resampled(key: str, value: object, neutral: object) -> Fault:
    reason = "the engine would renormalise the probabilities, the trainer does not: policy ratios would be wrong"
    cure = f"set {key}={neutral} for training (rollout.val may differ)"
    return Fault(key, value, reason, cure)


def top_p(cfg: RunConfig) -> list[Fault]:
    """Training samples from the whole distribution."""
    bad = cfg.needs.rollouts and cfg.rollout.top_p < 1
    return [_resampled("rollout.top_p", cfg.rollout.top_p, 1.0)] if bad else []


def top_k(cfg: RunConfig) -> list[Fault]:
    """Training samples from the whole distribution."""
    bad = cfg.needs.rollouts and cfg.rollout.top_k != -1
    return [_resampled("rollout.top_k", cfg.rollout.top_k, -1)] if bad else []


def validation_samples(cfg: RunConfig) -> list[Fault]:
    """Several validation samples of a prompt can differ."""
    val, data = cfg.rollout.val, cfg.data
    if not (data.val_files if cfg.needs.rollouts else cfg.samples_prompts) or val.n == 1 or val.temperature > 0:
        return []
    reason = f"{val.n} samples of each prompt would all be the same: rollout.val.temperature 0 is greedy"
    cure = "set rollout.val.temperature=1.0 (or another above 0), or rollout.val.n=1"
    return [Fault("rollout.val.n", val.n, reason, cure)]


def stop_texts(cfg: RunConfig) -> list[Fault]:
    """An empty text would end every response at once, or be an error of the engine's."""
    reason = "holds an empty text, which stands in every response"
    return [Fault("rollout.stop", cfg.rollout.stop, reason, "take it out")] if "" in cfg.rollout.stop else []


def template_keywords(cfg: RunConfig) -> list[Fault]:
    """What the run itself decides is no keyword of a chat template."""
    given = {
        "data": cfg.data.apply_chat_template_kwargs,
        "reward.model": cfg.reward.model.apply_chat_template_kwargs,
        "reward.judge": cfg.reward.judge.apply_chat_template_kwargs,
    }
    return [
        Fault(
            f"{section}.apply_chat_template_kwargs.{name}",
            value,
            "is no keyword that a template can be given here",
            RESERVED_KEYWORDS[name],
        )
        for section, keywords in given.items()
        for name, value in keywords.items()
        if name in RESERVED_KEYWORDS
    ]
