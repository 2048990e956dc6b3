"""How a record of settings is declared: config sections, losses and estimators alike. No torch."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

SectionT = TypeVar("SectionT")


class Variant:
    """Base of the records that a key chooses by their `type` (config/sections/base.py, Choice)."""


Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number from 0 to 1."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def section(cls: type[SectionT]) -> type[SectionT]:
    """Make `cls` a frozen record: values are checked when it is built, unknown keys are refused, nothing mutates.

    The string under each field is its documentation (`megatron-rl check --json` and docs/config.md show it).
    """
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
    wrap = cast(Any, pydantic_dataclass(frozen=True, kw_only=True, config=config))
    return cast("type[SectionT]", wrap(cls))
