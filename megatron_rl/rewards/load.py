"""From the name of a reward to a function of one sample or of a batch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from megatron_rl.config.checks.reward_forms import foreign_form
from megatron_rl.config.rewards import REWARDS
from megatron_rl.errors import MissingDependency, RewardError
from megatron_rl.rewards.base import BatchRewardFn, RewardFn, RewardSample
from megatron_rl.rewards.files import import_file

FORMS = (
    "accepted forms: fn(data_source, solution_str, ground_truth, extra_info), called by these names (any but "
    "solution_str may be left out), or fn(sample) with a megatron_rl.rewards.base.RewardSample; for a whole batch "
    "fn(data_sources, solution_strs, ground_truths, extra_infos), or a class whose instance is called with the list "
    "of samples; each may be async, and take the keywords of reward.kwargs too"
)
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_EXTRA_INFO: dict[str, Any] = {"num_turns": 2, "rollout_reward_scores": {}}
"""What verl adds to a row's extra_info: of one prompt and one response, and no rewards of an agent's."""
VERL_BATCH_NAMES = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}


@dataclass(frozen=True)
class LoadedReward:
    """A reward, ready to be called: with one sample, or with a list of samples where `takes_batch`."""

    spec: str
    function: Callable[[Any], object]
    """A RewardFn, or a BatchRewardFn."""
    takes_batch: bool = False
    is_async: bool = False
    """What it returns is to be awaited."""
    file: str | None = None
    """Where a reward of the user's is defined, for messages."""

    def __call__(self, argument: Any) -> object:
        return self.function(argument)


def load_reward(spec: str, kwargs: dict[str, Any] | None = None) -> LoadedReward:
    """The reward that `spec` names.

    spec: a name of REWARDS, `package.module:function`, or `path/to/file.py:function`. Which form the function
    has is read from its parameters: with a parameter solution_str (a batch: solution_strs) it is verl's. `kwargs`
    are passed with every call. In place of a function there may be a class: it is built once in each reward
    process, with `kwargs`, and called with the list of all samples.

    Raises RewardError: the name is unknown, the module does not import, it has no such function, the object
    is no function, or its parameters fit no form or lack one of `kwargs`. MissingDependency: a reward of
    REWARDS needs a package that is not installed.
    """
    function = _find(spec)
    reward = _adapt(function, spec, dict(kwargs or {}))
    called = getattr(function, "__call__", function) if not inspect.isroutine(function) else function  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    return replace(reward, is_async=is_async, file=None if spec in REWARDS else _file_of(function))


def _file_of(function: Any) -> str | None:
    """The file that defines a function or a class; None where it is none of Python."""
    place = function if inspect.isroutine(function) or isinstance(function, type) else type(function)
    try:
        return inspect.getsourcefile(inspect.unwrap(place))
    except TypeError:
        return None


def _find(spec: str) -> Any:
    source, colon, name = REWARDS.get(spec, spec).rpartition(":")
    if not colon:
        raise RewardError(
            f"reward.function: {spec!r} is no name of a reward{_did_you_mean(spec, list(REWARDS))} "
            f"-- use one of {', '.join(REWARDS)}, or package.module:function, or path/to/file.py:function"
        )
    if not source or not name:
        raise RewardError(f"reward.function: {spec!r} -- write package.module:function, or path/to/file.py:function")
    module = import_file(spec, source) if source.endswith(".py") or "/" in source else _import_module(spec, source)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        defined = f"; it defines {', '.join(known[:10])}" if known else "; it defines no function"
        raise RewardError(f"reward.function: {spec!r} -- {source} has no {name!r}{_did_you_mean(name, known)}{defined}")
    return found


def _import_module(spec: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except MissingDependency:
        raise
    except Exception as error:  # importing runs code of the user's: whatever it raises is the reason
        raise RewardError(
            f"reward.function: {spec!r} -- module {source} does not import ({type(error).__name__}: {error}) "
            "-- install it, or put its folder on PYTHONPATH"
        ) from error


def _adapt(function: Any, spec: str, kwargs: dict[str, Any]) -> LoadedReward:
    head = f"reward.function: {spec!r}"
    if not callable(function):
        raise RewardError(f"{head} is not callable, but a {type(function).__name__} -- {FORMS}")
    if isinstance(function, type):
        return LoadedReward(spec, _built(function, kwargs, head), takes_batch=True)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RewardError(f"{head} yields, and a reward returns its score -- write return in place of yield")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"{head} does not show its parameters ({error}) -- wrap it in a function; {FORMS}") from error
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    foreign = foreign_form(list(parameters))
    if foreign is not None:
        raise RewardError(f"{head} {foreign}; {FORMS}")
    unknown = [key for key in kwargs if key not in by_name]
    if unknown and not takes_any:
        raise RewardError(
            f"reward.kwargs: {', '.join(unknown)} -- {spec} takes no such keyword "
            f"(it takes {', '.join(by_name)}) -- take it out, or add it to the function"
        )
    for names, takes_batch in ((VERL_NAMES, False), (tuple(VERL_BATCH_NAMES), True)):
        if ("solution_strs" if takes_batch else "solution_str") not in by_name:
            continue
        passed = names if takes_any else tuple(name for name in names if name in by_name)
        _check_filled(parameters, {*passed, *kwargs}, head)
        adapted = _from_verl_batch if takes_batch else _from_verl
        return LoadedReward(spec, adapted(function, passed, kwargs), takes_batch)
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and name not in kwargs
    ]
    if not positional:
        raise RewardError(f"{head} takes ({', '.join(parameters)}) -- {FORMS}")
    _check_filled(parameters, {positional[0], *kwargs}, head)
    return LoadedReward(spec, lambda sample: function(sample, **kwargs))


def _built(cls: type, kwargs: dict[str, Any], head: str) -> BatchRewardFn:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise RewardError(f"{head} is a class without __call__(self, samples) -- add it, or name a function; {FORMS}")
    try:
        return cls(**kwargs)
    except TypeError as error:
        raise RewardError(
            f"{head} is a class that cannot be built with reward.kwargs {kwargs} ({error}) -- make them agree"
        ) from error
    except Exception as error:  # as while importing: code of the user's
        raise RewardError(f"{head} is a class whose __init__ fails ({type(error).__name__}: {error})") from error


def _from_verl(function: Callable[..., object], passed: tuple[str, ...], kwargs: dict[str, Any]) -> RewardFn:
    def score(sample: RewardSample) -> object:
        fields = _as_verl(sample)
        return function(**{name: fields[name] for name in passed}, **kwargs)

    return score


def _from_verl_batch(function: Callable[..., object], passed: tuple[str, ...], kwargs: dict[str, Any]) -> BatchRewardFn:
    def score(samples: Sequence[RewardSample]) -> object:
        rows = [_as_verl(sample) for sample in samples]
        columns = {name: [row[VERL_BATCH_NAMES[name]] for row in rows] for name in passed}
        return function(**columns, **kwargs)

    return score


def _as_verl(sample: RewardSample) -> dict[str, object]:
    """The fields that verl passes: its extra_info also says how many turns the conversation had."""
    return {
        "data_source": sample.data_source,
        "solution_str": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "extra_info": {**VERL_EXTRA_INFO, **sample.extra_info},
    }


def _check_filled(parameters: Any, filled: set[str], head: str) -> None:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in filled and parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]
    if missing:
        raise RewardError(f"{head} needs {', '.join(missing)}, which nothing gives -- {FORMS}")


def _did_you_mean(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
