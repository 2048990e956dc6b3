"""What several config sections are declared with; `section` itself is in megatron_rl/settings.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, cast

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core.core_schema import (
    CoreSchema,
    literal_schema,
    no_info_before_validator_function,
    no_info_wrap_validator_function,
    tagged_union_schema,
)

from megatron_rl.settings import Variant
from megatron_rl.settings import section as section

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as typed; a leading ~ becomes the home folder, relative ones start at the working directory."""


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class OneOf:
    """The choices of a text key, where a table holds them: `Literal` of names that are known at run time."""

    names: tuple[str, ...]
    path: str = ""
    """Form of the other values that are taken, each with a colon; empty: there are none."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The choices as a reader is told them."""
        return (*self.names, self.path) if self.path else self.names

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        names = literal_schema(list(self.names))
        return no_info_wrap_validator_function(self._or_path, names) if self.path else names

    @staticmethod
    def _or_path(value: object, one_of_names: ValidatorFunctionWrapHandler) -> object:
        return value if isinstance(value, str) and ":" in value else one_of_names(value)


OneOrMany = BeforeValidator(_one_as_list)
"""Lets a list of strings be written as a single string."""


@dataclass(frozen=True)
class Choice:
    """Mark of a key that holds one of several records of settings: a name, or {type: name, setting: value, ...}.

    Example: Annotated[PolicyLoss, Choice(LOSSES, "ppo_clip", {"loss_mode": "type"})] reads `loss: sapo` and
    `loss: {type: sapo, tau_pos: 1.0}`.
    """

    classes: Mapping[str, type[Variant]]
    default: str
    """the type if none is given"""
    short: Mapping[str, str]
    """key beside this one -> the setting that it means, or "type": the names that verl's users know"""

    def type_of(self, record: Variant) -> str:
        """The name of the record's class."""
        return next(name for name, chosen in self.classes.items() if record.__class__ is chosen)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[object, CoreSchema] = {
            name: no_info_before_validator_function(_without_type, handler.generate_schema(chosen))
            for name, chosen in self.classes.items()
        }
        return tagged_union_schema(choices, self._tag)

    def _tag(self, value: object) -> str | None:
        if isinstance(value, Variant):
            return next((name for name, chosen in self.classes.items() if value.__class__ is chosen), None)
        if isinstance(value, str):
            return value
        return cast("dict[str, str]", value).get("type", self.default) if isinstance(value, dict) else None


def _without_type(value: object) -> object:
    if isinstance(value, str):
        return {}
    if isinstance(value, dict):
        return {name: setting for name, setting in cast("dict[str, object]", value).items() if name != "type"}
    return value
