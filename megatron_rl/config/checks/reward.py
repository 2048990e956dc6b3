"""Checks of section `reward`: compositions that can be read, rewards that exist, models with a folder."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import cast

from megatron_rl.config.checks.model import ModelShapes
from megatron_rl.config.checks.reward_files import reward_file
from megatron_rl.config.checks.reward_terms import (
    LARGEST_SCORE,
    First,
    Reward,
    Sum,
    Term,
    numbers_in,
    parse_reward,
    rewards_in,
)
from megatron_rl.config.checks.words import unknown_name
from megatron_rl.config.rewards import REWARDS
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.reward import JudgeConfig, RewardConfig, RewardModelConfig
from megatron_rl.engines import ENGINES, OPTIONAL_SETTINGS
from megatron_rl.errors import Fault

WORKER_NAMES = ("model", "judge")
"""Rewards that models give, in workers of their own."""
JUDGE_FIELDS = ("prompt", "response", "ground_truth")
_FORMS = "a name, package.module:function, path/to/file.py:function, or a composition such as `a | b` or `a + 0.5 * b`"


@dataclass(frozen=True)
class RewardPlan:
    """The rewards of a run, with the keywords of each in its place."""

    default: Term
    by_source: dict[str, Term]

    def terms(self) -> tuple[Term, ...]:
        return (self.default, *self.by_source.values())

    def rewards(self) -> list[Reward]:
        """Each reward that any source names, once."""
        found: list[Reward] = []
        for term in self.terms():
            found += [reward for reward in rewards_in(term) if reward not in found]
        return found

    def uses(self, name: str) -> bool:
        """Whether a source's reward names this one."""
        return any(reward.spec == name for reward in self.rewards())


def plan_rewards(cfg: RewardConfig) -> tuple[RewardPlan | None, list[Fault]]:
    """The rewards that the section describes; None with the faults that stand in the way."""
    parts, faults = _parts(cfg)
    terms: dict[str, Term] = {}
    texts = {"reward.function": cfg.function} | {
        f"reward.by_source.{name}": text for name, text in cfg.by_source.items()
    }
    for key, text in texts.items():
        try:
            terms[key] = _with_parts(parse_reward(text), parts)
        except ValueError as error:
            cure = f"write {_FORMS}; a path with spaces or operators stands in quotes"
            faults.append(Fault(key, text, str(error), cure))
    if faults:
        return None, faults
    plan = RewardPlan(terms.pop("reward.function"), {key.split(".", 2)[2]: term for key, term in terms.items()})
    if not cfg.kwargs:
        return plan, []
    rules = [reward for reward in plan.rewards() if reward.spec not in WORKER_NAMES]
    if len(rules) != 1 or rules[0].kwargs:
        reason = f"which of {len(rules)} rewards they are for is not said"
        cure = "give the reward a name and its keywords in reward.parts: {name: {function: ..., kwargs: {...}}}"
        return None, [Fault("reward.kwargs", cfg.kwargs, reason, cure)]
    with_kwargs = {rules[0].spec: dataclasses.replace(rules[0], kwargs=dict(cfg.kwargs))}
    return RewardPlan(
        _with_parts(plan.default, with_kwargs),
        {name: _with_parts(term, with_kwargs) for name, term in plan.by_source.items()},
    ), []


def _parts(cfg: RewardConfig) -> tuple[dict[str, Reward], list[Fault]]:
    parts: dict[str, Reward] = {}
    faults: list[Fault] = []
    for name, entry in cfg.parts.items():
        key = f"reward.parts.{name}"
        cure = "write {function: a reward, kwargs: {keyword: value}}"
        if not name.isidentifier() or name in (*REWARDS, *WORKER_NAMES):
            faults.append(Fault(key, name, "is no free name", "use letters, digits and _, and no name of a reward"))
        elif not isinstance(entry, dict):
            faults.append(Fault(key, entry, "is not a mapping", cure))
        else:
            values = cast("dict[str, object]", entry)
            kwargs: object = values.get("kwargs", {})
            unknown = sorted(set(values) - {"function", "kwargs"})
            if unknown:
                faults.append(Fault(f"{key}.{unknown[0]}", values[unknown[0]], "there is no such key", cure))
            elif not isinstance(values.get("function"), str) or not isinstance(kwargs, dict):
                faults.append(Fault(key, values, "has no function, or kwargs that are no mapping", cure))
            else:
                parts[name] = Reward(str(values["function"]), {**cast("dict[str, object]", kwargs)})
    return parts, faults


def _with_parts(term: Term, parts: dict[str, Reward]) -> Term:
    """The composition with the rewards that `parts` name in place of their names."""
    if isinstance(term, Reward):
        return parts.get(term.spec, term)
    if isinstance(term, First):
        return First(tuple(_with_parts(part, parts) for part in term.terms))
    if isinstance(term, Sum):
        return Sum(tuple((weight, _with_parts(part, parts)) for weight, part in term.parts))
    return term


def reward_functions(cfg: RunConfig) -> list[Fault]:
    """Every reward is a known name, or a file that defines it; modules are imported later, by rewards."""
    if not cfg.has_rewards:
        return []
    plan, faults = plan_rewards(cfg.reward)
    if plan is None:
        return faults
    for reward in plan.rewards():
        spec = reward.spec
        if spec in (*REWARDS, *WORKER_NAMES):
            continue
        place, colon, name = spec.rpartition(":")
        if not colon:
            fault = unknown_name("reward.function", spec, (*REWARDS, *WORKER_NAMES, *cfg.reward.parts))
            forms = "; or package.module:function, or path/to/file.py:function"
            faults.append(Fault(fault.key, fault.value, fault.reason, fault.cure + forms))
        elif not place or not name.isidentifier():
            cure = "write package.module:function, or path/to/file.py:function"
            faults.append(Fault("reward.function", spec, "does not name a place and a function", cure))
        elif place.endswith(".py") or "/" in place:
            faults += reward_file(spec, Path(place), name)
    return faults


def failed_score(cfg: RunConfig) -> list[Fault]:
    """The score of a failed sample is small enough to be trained on."""
    score = cfg.reward.failed_score if cfg.has_rewards else 0.0
    return _number_faults({"reward.failed_score": score})


def judge_range(cfg: RunConfig) -> list[Fault]:
    """The judge's numbers are small enough to be trained on."""
    if not cfg.has_rewards:
        return []
    judge = cfg.reward.judge
    return _number_faults({"reward.judge.lowest": judge.lowest, "reward.judge.highest": judge.highest})


def _number_faults(numbers: Mapping[str, float]) -> list[Fault]:
    faults = {key: _number_fault(number) for key, number in numbers.items()}
    cure = "write a number such as 0 or -1"
    return [Fault(key, numbers[key], fault, cure) for key, fault in faults.items() if fault is not None]


def reward_numbers(cfg: RunConfig) -> list[Fault]:
    """Numbers in a composition of rewards are finite, and small enough to be trained on."""
    reward = cfg.reward
    plan = plan_rewards(reward)[0] if cfg.has_rewards else None
    if plan is None:
        return []
    terms = {"reward.function": (reward.function, plan.default)}
    terms |= {f"reward.by_source.{name}": (reward.by_source[name], term) for name, term in plan.by_source.items()}
    return [
        Fault(key, text, f"its number {number:g} {fault}", "write a smaller number")
        for key, (text, term) in terms.items()
        for number in numbers_in(term)
        if (fault := _number_fault(number)) is not None
    ]


def _number_fault(number: float) -> str | None:
    if not math.isfinite(number):
        return "is not finite"
    return f"is larger than {LARGEST_SCORE:g} in magnitude" if abs(number) > LARGEST_SCORE else None


def reward_model(cfg: RunConfig) -> list[Fault]:
    """The reward model has what it needs if a reward names it, and is not set if none does."""
    plan = plan_rewards(cfg.reward)[0] if cfg.has_rewards else None
    return [] if plan is None else _model_faults(cfg.reward.model, plan.uses("model"))


def judge(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The judge has what it needs if a reward names it, and is not set if none does."""
    plan = plan_rewards(cfg.reward)[0] if cfg.has_rewards else None
    return [] if plan is None else _judge_faults(cfg.reward.judge, plan.uses("judge"), models)


def unread(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, why) of settings in this section that nothing in the run reads."""
    reward = cfg.reward
    if not cfg.has_rewards:
        yield from (
            (f"reward.{name}", f"algorithm.name {cfg.algorithm.name} has no rewards")
            for name in ("function", "kwargs", "parts", "by_source")
        )
        return
    plan, _ = plan_rewards(reward)
    if plan is None:
        return
    if all(one.spec in WORKER_NAMES for one in plan.rewards()):
        yield from (
            (f"reward.{name}", "no reward is a rule") for name in ("num_workers", "timeout_s", "memory_limit_gb")
        )
    for name, worker in (("model", reward.model), ("judge", reward.judge)):
        keys = [field.name for field in dataclasses.fields(worker)]
        if not plan.uses(name):
            yield from ((f"reward.{name}.{key}", f"no reward names `{name}`") for key in keys if key != "path")
        elif cfg.cluster.backend == "inline":
            idle = ("num_workers", "num_cpus", "own_gpu")
            yield from ((f"reward.{name}.{key}", "cluster.backend is inline") for key in idle)
    if plan.uses("judge"):
        engine = ENGINES[reward.judge.engine]
        idle = {field.name for field in dataclasses.fields(reward.judge)}.intersection(OPTIONAL_SETTINGS)
        why = f"the engine {engine.name} does not read it"
        yield from ((f"reward.judge.{key}", why) for key in sorted(idle - engine.settings))


def _folder_faults(key: str, path: str | None, used: bool) -> Iterator[Fault]:
    name = key.rpartition(".")[2]
    if not used and path is not None:
        cure = f"name it, for instance reward.function='exact_match + 0.5 * {name}', or leave {key}.path out"
        yield Fault(f"{key}.path", path, f"no reward names `{name}`", cure)
    elif used and path is None:
        yield Fault(f"{key}.path", None, f"a reward names `{name}`", "give the folder of its model")
    elif used and not (Path(str(path)) / "config.json").is_file():
        yield Fault(f"{key}.path", path, "the folder has no config.json", "give the folder of a Hugging Face model")


def _model_faults(model: RewardModelConfig, used: bool) -> list[Fault]:
    faults = list(_folder_faults("reward.model", model.path, used))
    if faults or not used:
        return faults
    file = Path(str(model.path)) / "config.json"
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Fault("reward.model.path", str(file), f"is not valid JSON: {error}", "write the file again")]
    if not isinstance(content, dict):
        return [Fault("reward.model.path", str(file), "is no JSON object", "write the file again")]
    config = cast("dict[str, object]", content)
    # transformers' own default is two labels.
    named = config.get("id2label")
    labels = config.get("num_labels") or (len(cast("dict[str, object]", named)) if isinstance(named, dict) else 0) or 2
    names = [str(name) for name in cast("list[object]", config.get("architectures") or [])]
    if labels != 1:
        reason = f"its classifier has {labels} labels, and a reward is one number"
        faults.append(Fault("reward.model.path", model.path, reason, "use a model with num_labels 1"))
    if names and not any(name.endswith("ForSequenceClassification") for name in names):
        reason = f"is a {', '.join(names)}, which has no classifier"
        cure = "use a ...ForSequenceClassification model, or reward.judge for a language model"
        faults.append(Fault("reward.model.path", model.path, reason, cure))
    return faults


def _judge_faults(judge: JudgeConfig, used: bool, models: ModelShapes) -> list[Fault]:
    faults = list(_folder_faults("reward.judge", judge.path, used))
    if not used:
        return faults
    if not faults:
        faults += models.inspect(str(judge.path), "reward.judge.path")[1]
    try:
        groups = re.compile(judge.score_pattern).groups
        if groups != 1:
            cure = "put ( ) around the number, and (?: ) around the rest"
            faults.append(Fault("reward.judge.score_pattern", judge.score_pattern, f"has {groups} groups, not 1", cure))
    except re.error as error:
        cure = "correct it, or leave it out"
        faults.append(Fault("reward.judge.score_pattern", judge.score_pattern, f"is no pattern: {error}", cure))
    try:
        fields = {name for _, name, _, _ in Formatter().parse(judge.template) if name is not None}
    except ValueError as error:
        fields, reason = {"response"}, f"cannot be filled in: {error}"
        faults.append(Fault("reward.judge.template", judge.template, reason, "write literal brackets as {{ and }}"))
    known = ", ".join(f"{{{name}}}" for name in JUDGE_FIELDS)
    if fields - set(JUDGE_FIELDS):
        reason = f"names {', '.join(sorted(fields - set(JUDGE_FIELDS)))}, which nothing gives"
        cure = f"use {known}; write literal brackets as {{{{ and }}}}"
        faults.append(Fault("reward.judge.template", judge.template, reason, cure))
    if "response" not in fields:
        faults.append(Fault("reward.judge.template", judge.template, "does not show the response", f"use {known}"))
    if judge.highest <= judge.lowest:
        reason = f"is not above reward.judge.lowest {judge.lowest:g}"
        faults.append(Fault("reward.judge.highest", judge.highest, reason, "raise it"))
    return faults
