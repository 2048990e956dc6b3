"""Errors cross process borders as themselves."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Iterator

import pytest

import megatron_rl.trainers  # noqa: F401  every module that defines an error of its own is loaded with it
from megatron_rl.errors import ConfigError, Fault, MegatronRLError


def below(error: type[MegatronRLError]) -> Iterator[type[MegatronRLError]]:
    for one in error.__subclasses__():
        yield one
        yield from below(one)


ERRORS = sorted(set(below(MegatronRLError)), key=str)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_survives_pickling_and_is_a_built_in_one_too(error: type[MegatronRLError]) -> None:
    made = error([Fault("a.b", 1, "reason", "cure")]) if issubclass(error, ConfigError) else error("words")
    copy = pickle.loads(pickle.dumps(made))
    assert type(copy) is error
    assert str(copy) == str(made)
    own = {one for one in error.__mro__ if one.__module__ == builtins.__name__}
    assert own - {Exception, BaseException, object}
