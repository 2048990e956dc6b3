"""What several config sections are declared with; `section` itself is in megatron_rl/settings.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler
from pydantic_core.core_schema import CoreSchema, literal_schema

from megatron_rl.settings import section as section

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
