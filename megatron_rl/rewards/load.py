"""From what reward.function says to a function of one sample."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.errors import MissingDependency, RewardError
from megatron_rl.rewards import REWARDS
from megatron_rl.rewards.base import RewardFn, RewardSample

FORMS = (
    "accepted forms: fn(data_source, solution_str, ground_truth, extra_info), called by these names (any but "
    "solution_str may be left out), or fn(sample) with a megatron_rl.rewards.base.RewardSample; each may "
    "take the keywords of reward.kwargs too"
)
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward(spec: str, kwargs: dict[str, Any] | None = None) -> RewardFn:
    """The reward that `spec` names, as a function of one RewardSample.

    spec: a name of REWARDS, `package.module:function`, or `path/to/file.py:function`. Which of the two forms
    the function has is read from its parameters: with a parameter solution_str it is verl's. `kwargs` are
    passed with every call.

    Raises RewardError: the name is unknown, the module does not import, it has no such function, the object
    is no function, or its parameters fit neither form or lack one of `kwargs`. MissingDependency: a reward of
    REWARDS needs a package that is not installed.
    """
    function = _find(spec)
    return _adapt(function, spec, dict(kwargs or {}))


def _find(spec: str) -> Any:
    source, colon, name = REWARDS.get(spec, spec).rpartition(":")
    if not colon:
        raise RewardError(
            f"reward.function: {spec!r} is no name of a reward{_did_you_mean(spec, list(REWARDS))} "
            f"-- use one of {', '.join(REWARDS)}, or package.module:function, or path/to/file.py:function"
        )
    if not source or not name:
        raise RewardError(f"reward.function: {spec!r} -- write package.module:function, or path/to/file.py:function")
    module = _import_file(spec, source) if source.endswith(".py") or "/" in source else _import_module(spec, source)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        defined = f"; it defines {', '.join(known[:10])}" if known else "; it defines no function"
        raise RewardError(f"reward.function: {spec!r} -- {source} has no {name!r}{_did_you_mean(name, known)}{defined}")
    return getattr(module, name)


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


def _import_file(spec: str, source: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise RewardError(f"reward.function: {spec!r} -- there is no file {path} -- give a path that exists")
    name = f"megatron_rl_reward_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"reward.function: {spec!r} -- {path} is no Python file -- give a file that ends with .py")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # as above
        del sys.modules[name]
        raise RewardError(
            f"reward.function: {spec!r} -- {path} does not import ({type(error).__name__}: {error}) -- correct the file"
        ) from error
    return module


def _adapt(function: Any, spec: str, kwargs: dict[str, Any]) -> RewardFn:
    head = f"reward.function: {spec!r}"
    if not callable(function):
        raise RewardError(f"{head} is not callable, but a {type(function).__name__} -- {FORMS}")
    if isinstance(function, type):
        raise RewardError(f"{head} is a class -- name a function, or an instance that can be called; {FORMS}")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"{head} is a coroutine function -- write it without async: samples are scored in processes")
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
    unknown = [key for key in kwargs if key not in by_name]
    if unknown and not takes_any:
        raise RewardError(
            f"reward.kwargs: {', '.join(unknown)} -- {spec} takes no such keyword "
            f"(it takes {', '.join(by_name)}) -- take it out, or add it to the function"
        )
    if "solution_str" in by_name:
        passed = VERL_NAMES if takes_any else tuple(name for name in VERL_NAMES if name in by_name)
        _check_filled(parameters, {*passed, *kwargs}, head)
        return _from_verl(function, passed, kwargs)
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and name not in kwargs
    ]
    if not positional:
        raise RewardError(f"{head} takes ({', '.join(parameters)}) -- {FORMS}")
    _check_filled(parameters, {positional[0], *kwargs}, head)
    return lambda sample: function(sample, **kwargs)


def _from_verl(function: Callable[..., object], passed: tuple[str, ...], kwargs: dict[str, Any]) -> RewardFn:
    def score(sample: RewardSample) -> object:
        return function(**{name: getattr(sample, name) for name in passed}, **kwargs)

    return score


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
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
