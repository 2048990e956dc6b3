"""The one way config sections are declared: frozen, keyword-only, closed pydantic dataclasses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core.core_schema import CoreSchema, literal_schema

SectionT = TypeVar("SectionT")

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as typed; a leading ~ becomes the home folder, relative ones start at the working directory."""


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class OneOf:
    """The choices of a text key, where a table holds them: `Literal` of names that are known at run time."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return literal_schema(list(self.names))


OneOrMany = BeforeValidator(_one_as_list)
"""Lets a list of strings be written as a single string."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def section(cls: type[SectionT]) -> type[SectionT]:
    """Make `cls` a config section: values checked when it is built, unknown keys refused, nothing mutates.

    The string under each field is its documentation (`megatron-rl check --json` and docs/config.md show it).
    """
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
    wrap = cast(Any, pydantic_dataclass(frozen=True, kw_only=True, config=config))
    return cast("type[SectionT]", wrap(cls))
