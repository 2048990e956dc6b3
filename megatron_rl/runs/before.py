"""What is looked at before any worker starts: headers of weight files, data, tokenizer, template, rewards.

`train` and `eval` look at the weights here and at the rest when their trainer is made; `check --data` looks at all of
it and tells every fault at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from megatron_rl.cluster.preflight import preflight
from megatron_rl.config.checks.reward import plan_rewards
from megatron_rl.config.run import RunConfig
from megatron_rl.data.preferences import preference_reader
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.render import Renderer
from megatron_rl.data.sft import load_sft
from megatron_rl.errors import CheckpointError, MegatronRLError
from megatron_rl.experience.scoring import RunRewards
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_critic_shape, read_model_shape
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.runs.summary import summary_lines
from megatron_rl.trainers.parts import Counted
from megatron_rl.types import Prompt
from megatron_rl.weights.heads import ValueHeadSource, value_head_shapes
from megatron_rl.weights.safetensors import SafetensorsSource

T = TypeVar("T")
CountedT = TypeVar("CountedT", bound=Counted)
MOST_TOKENS_SHOWN = 400
"""Tokens of a row that `check --data` prints."""


@dataclass
class Findings:
    """What `check --data` has to say: lines for a reader, and the message of each fault."""

    lines: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])


def weight_faults(cfg: RunConfig, needs_rewards: bool) -> list[str]:
    """Tensors that are missing, surplus or misshaped, and broken files, of every model that this run will load.

    Reads the headers of the safetensors files. needs_rewards: whether a judge is loaded too.
    """
    faults: list[str] = []
    for key, check in _weight_checks(cfg, needs_rewards):
        try:
            check()
        except CheckpointError as error:
            faults.append(f"{key}: {error}")
    return faults


def require_weights(cfg: RunConfig, needs_rewards: bool) -> None:
    """CheckpointError with all weight_faults."""
    faults = weight_faults(cfg, needs_rewards)
    if faults:
        raise CheckpointError("\n".join(faults))


def _weight_checks(cfg: RunConfig, needs_rewards: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    changes = cfg.model.override_config
    if cfg.model.init == "pretrained" and cfg.needs.reward_head:
        yield "model.path", lambda: _check_critic(cfg.model.path, biased=False)
    elif cfg.model.init == "pretrained":
        yield "model.path", lambda: _check_weights(cfg.model.path, read_model_shape(cfg.model.path, changes=changes))
    if cfg.needs_reference and cfg.ref.path is not None:
        ref = str(cfg.ref.path)
        yield "ref.path", lambda: _check_weights(ref, read_model_shape(ref, changes=changes))
    if cfg.critic.enable and cfg.critic.path is not None:
        yield "critic.path", lambda: _check_critic(str(cfg.critic.path))
    plan, _ = plan_rewards(cfg.reward) if needs_rewards else (None, [])
    if plan is not None and plan.uses("judge"):
        judge = str(cfg.reward.judge.path)
        yield "reward.judge.path", lambda: _check_weights(judge, read_model_shape(judge))


def _check_weights(folder: str, shape: ModelShape) -> None:
    SafetensorsSource(folder).check(hf_shapes(shape, FAMILIES[shape.architecture]))


def _check_critic(folder: str, biased: bool = True) -> None:
    shape, kind = read_critic_shape(folder)
    body = hf_shapes(shape, FAMILIES[shape.architecture])
    head = {name: size for name, size in body.items() if name.startswith("lm_head.")}
    body = {name: size for name, size in body.items() if name not in head}
    source = ValueHeadSource(SafetensorsSource(folder), kind, head if kind == "causal" else {})
    source.check(body | value_head_shapes(shape, biased))


def inspect(cfg: RunConfig, color: bool | None = None) -> Findings:
    """Read all data, the tokenizer, the template, rewards and headers of weights, as the run would; start no worker.

    color: mark trained tokens in colour; by default where standard output is a terminal and NO_COLOR is not set.
    """
    findings = Findings()
    _try(findings, lambda: preflight(cfg, needs_rollout=cfg.has_engine, trains=True))
    findings.faults += weight_faults(cfg, needs_rewards=cfg.has_rewards)
    renderer = _try(findings, lambda: Renderer.from_config(cfg.model, cfg.data))
    if renderer is None:
        return findings
    in_color = color if color is not None else sys.stdout.isatty() and "NO_COLOR" not in os.environ
    look = _look_at_prompts if cfg.needs.rollouts else _look_at_samples
    look = _look_at_preferences if cfg.needs.preferences else look
    look(cfg, renderer, findings, in_color)
    return findings


def _look_at_prompts(cfg: RunConfig, renderer: Renderer, findings: Findings, color: bool) -> None:
    sets = _read_sets(cfg, renderer, findings, load_prompts)
    # Rewards are judged by the rows that they will see: without all of them, a fault may be the rows' own.
    if len(sets) == 1 + bool(cfg.data.val_files):
        _try(findings, lambda: _check_rewards(cfg, [prompt for one in sets.values() for prompt in one.prompts]))
    if "train" in sets:
        ids = sets["train"].prompts[0].token_ids
        findings.lines += row_lines("first prompt", ids, [False] * len(ids), renderer, color)


def _look_at_samples(cfg: RunConfig, renderer: Renderer, findings: Findings, color: bool) -> None:
    sets = _read_sets(cfg, renderer, findings, load_sft)
    if "train" in sets:
        sample = sets["train"].samples[0]
        # The first token of a sequence is predicted by nothing.
        mask = [False, *sample.loss_mask[1:]]
        findings.lines += row_lines("first row", sample.token_ids, mask, renderer, color)
    files = cfg.data.val_prompt_files
    prompts = _try(findings, lambda: load_prompts(cfg.data, files, renderer, validation=True)) if files else None
    if prompts is not None:
        findings.lines += summary_lines({"val prompts": prompts}, {})
        _try(findings, lambda: _check_rewards(cfg, prompts.items))


def _look_at_preferences(cfg: RunConfig, renderer: Renderer, findings: Findings, color: bool) -> None:
    sets = _read_sets(cfg, renderer, findings, preference_reader(cfg))
    if "train" in sets:
        for number, answer in enumerate(sets["train"].items[0].answers, start=1):
            mask = [False, *answer.loss_mask[1:]]
            findings.lines += row_lines(f"first row, answer {number}", answer.token_ids, mask, renderer, color)


def _read_sets(
    cfg: RunConfig, renderer: Renderer, findings: Findings, load: Callable[..., CountedT]
) -> dict[str, CountedT]:
    """The training set and, where there is one, the validation set: those that could be read, with their summary."""
    data, sets = cfg.data, dict[str, CountedT]()
    for name, files in (("train", data.train_files), ("val", data.val_files)):
        if name == "val" and not files:
            continue
        found = _try(findings, lambda files=files, name=name: load(data, files, renderer, validation=name == "val"))
        if found is not None:
            sets[name] = found
    findings.lines += summary_lines(sets, data.mix_weights)
    return sets


def _check_rewards(cfg: RunConfig, prompts: Sequence[Prompt]) -> None:
    rewards = RunRewards(cfg)
    rewards.start(spread=False)
    try:
        rewards.preflight(prompts)
    finally:
        rewards.close()


def row_lines(title: str, token_ids: Sequence[int], mask: Sequence[bool], renderer: Renderer, color: bool) -> list[str]:
    """A row as its text, its ids and what is trained on: [[...]] around trained stretches, or green where color."""
    trained = sum(mask)
    head = f"{title}: {len(token_ids)} tokens, {trained} trained on" if trained else f"{title}: {len(token_ids)} tokens"
    stretches = [
        (is_trained, [token for _, token in group])
        for is_trained, group in groupby(
            list(zip(mask, token_ids, strict=True))[:MOST_TOKENS_SHOWN], key=lambda pair: pair[0]
        )
    ]
    marks = ("\033[32m", "\033[0m") if color else ("[[", "]]")

    def shown(write: Callable[[list[int]], str], between: str) -> str:
        return between.join(f"{marks[0]}{write(ids)}{marks[1]}" if on else write(ids) for on, ids in stretches)

    rest = len(token_ids) - MOST_TOKENS_SHOWN
    more = [f"  ... and {rest:,} more tokens"] if rest > 0 else []
    # One line: what a terminal would do with line ends and control characters is not what the model sees.
    text = shown(lambda ids: repr(renderer.decode(ids, skip_special_tokens=False))[1:-1], "")
    return [head, f"  text  {text}", f"  ids   {shown(lambda ids: ' '.join(map(str, ids)), ' ')}", *more]


def _try(findings: Findings, work: Callable[[], T]) -> T | None:
    """What `work` returns; None where it refuses, and then its words are among the faults."""
    try:
        return work()
    except MegatronRLError as error:
        findings.faults.append(str(error))
        return None
